#!/usr/bin/env bash
# Train GPT-350M-16E (MoC-System Table 1) on 2 nodes of 8 GPUs, Case 3 of its Table 2: DP 16, EP 8. See README.md.
set -euo pipefail
nodes=2
flags=(
    --expert-model-parallel-size 8
    # Batch and learning rate are not published: those of GPT-3. 1,908 iterations are the published 1 G tokens.
    --micro-batch-size 8 --global-batch-size 512 --seq-length 1024 --train-iters 1908 --lr 3e-4 --min-lr 3e-5
    # GPT-2's vocabulary, of which the last id stands for the end of a document.
    --vocab-size 50257 --max-position-embeddings 1024
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 4096
    --num-experts 16 --moe-router-topk 1 --moe-router-pre-softmax --moe-layer-freq '[0,1]*12'
    # Two levels, as in MoC-System Fig. 14: 4 experts per layer to memory, 1 of them to storage.
    --moe-ckpt-strategy pec --moe-ckpt-pec-k-snapshot 4 --moe-ckpt-pec-k-persist 1 --moe-ckpt-plt-threshold 0.0375
)
# shellcheck source=examples/common/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/train.sh"

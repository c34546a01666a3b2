#!/usr/bin/env bash
# Train GPT-125M-8E (MoC-System Table 1) on one node of 8 GPUs, with partial experts checkpointing. See README.md.
set -euo pipefail
nodes=1
flags=(
    # The layout, batch and learning rate are not published: experts within the node, GPT-3's batch and rate.
    --expert-model-parallel-size 8
    --micro-batch-size 16 --global-batch-size 512 --seq-length 1024 --train-iters 2000 --lr 6e-4 --min-lr 6e-5
    # GPT-2's vocabulary, of which the last id stands for the end of a document.
    --vocab-size 50257 --max-position-embeddings 1024
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --ffn-hidden-size 3072
    --num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --moe-layer-freq '[0,1]*6'
    # One expert per layer in each snapshot, as in MoC-System Fig. 5; K doubles before faults cost more than 3.75 %.
    --moe-ckpt-strategy pec --moe-ckpt-pec-k-snapshot 1 --moe-ckpt-plt-threshold 0.0375
)
# shellcheck source=examples/common/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/train.sh"

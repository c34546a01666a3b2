#!/usr/bin/env bash
# Train GPT-MoE (MoEvement Table 2) on 12 nodes of 8 GPUs: PP 3, 4 pipelines, EP 8 (MoEvement 5.1). See README.md.
set -euo pipefail
nodes=12
flags=(
    --pipeline-model-parallel-size 3 --expert-model-parallel-size 8
    # 32 samples are one pipeline's microbatch, 4 on each of the 8 ranks of a stage. The learning rate is not published.
    --micro-batch-size 4 --global-batch-size 512 --seq-length 2048 --train-iters 10000 --lr 3e-4 --min-lr 3e-5
    # GPT-2's vocabulary, of which the last id stands for the end of a document.
    --vocab-size 50257 --max-position-embeddings 2048
    --num-layers 12 --hidden-size 1536 --num-attention-heads 16 --ffn-hidden-size 6144
    --num-experts 32 --moe-router-topk 6
    --moe-ckpt-strategy sparse --moe-ckpt-replicas 2 --deterministic-mode
)
# shellcheck source=examples/common/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/train.sh"

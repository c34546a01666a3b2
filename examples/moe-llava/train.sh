#!/usr/bin/env bash
# Train the language backbone of MoE-LLaVa (MoEvement Table 2) on 12 nodes of 8 GPUs: PP 6, 2 pipelines, EP 4. See
# README.md.
set -euo pipefail
nodes=12
flags=(
    # EP is 8 in MoEvement 5.1, which 4 experts cannot fill.
    --pipeline-model-parallel-size 6 --expert-model-parallel-size 4
    # As the paper's other models; neither tokens per sample nor the learning rate are published.
    --micro-batch-size 4 --global-batch-size 512 --seq-length 2048 --train-iters 10000 --lr 3e-4 --min-lr 3e-5
    # StableLM's vocabulary, of which the last id stands for the end of a document.
    --vocab-size 100352 --untie-embeddings-and-output-weights --max-position-embeddings 2048
    --position-embedding-type rope --rotary-percent 0.25
    --num-layers 24 --hidden-size 2048 --num-attention-heads 32 --ffn-hidden-size 5632
    --normalization LayerNorm --swiglu --disable-bias-linear
    --num-experts 4 --moe-router-topk 2 --moe-layer-freq '[0,1]*12'
    --moe-ckpt-strategy sparse --moe-ckpt-replicas 2 --deterministic-mode
)
# shellcheck source=examples/common/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/train.sh"

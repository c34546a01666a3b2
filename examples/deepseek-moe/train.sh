#!/usr/bin/env bash
# Train DeepSeek-MoE (MoEvement Table 2, DeepSeekMoE-16B) on 14 nodes of 8 GPUs: PP 14, 1 pipeline, EP 8. See README.md.
set -euo pipefail
nodes=14
flags=(
    # PP is 12 in MoEvement 5.1; stages have equal numbers of layers here, and 28 layers do not divide by 12.
    --pipeline-model-parallel-size 14 --expert-model-parallel-size 8
    # 32 samples are one pipeline's microbatch, 4 on each of the 8 ranks of a stage. The learning rate is not published.
    --micro-batch-size 4 --global-batch-size 512 --seq-length 2048 --train-iters 10000 --lr 3e-4 --min-lr 3e-5
    # DeepSeek's vocabulary, of which the last id stands for the end of a document.
    --vocab-size 102400 --untie-embeddings-and-output-weights --max-position-embeddings 2048
    --position-embedding-type rope
    --num-layers 28 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 10944
    --normalization RMSNorm --swiglu --disable-bias-linear
    --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816
    --moe-layer-freq '[0]+[1]*27'
    --moe-ckpt-strategy sparse --moe-ckpt-replicas 2 --deterministic-mode
)
# shellcheck source=examples/common/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/train.sh"

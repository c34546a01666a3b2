#!/usr/bin/env bash
# Train QWen-MoE (MoEvement Table 2, Qwen1.5-MoE-A2.7B) on 12 nodes of 8 GPUs: PP 6, 2 pipelines, EP 4. See README.md.
set -euo pipefail
nodes=12
flags=(
    # EP is 8 in MoEvement 5.1, by which the model's 60 experts cannot be shared out evenly.
    --pipeline-model-parallel-size 6 --expert-model-parallel-size 4
    # 32 samples are one pipeline's microbatch, 4 on each of the 8 ranks of a stage. The learning rate is not published.
    --micro-batch-size 4 --global-batch-size 512 --seq-length 2048 --train-iters 10000 --lr 3e-4 --min-lr 3e-5
    # Qwen's vocabulary, of which the last id stands for the end of a document.
    --vocab-size 151936 --untie-embeddings-and-output-weights --max-position-embeddings 2048
    --position-embedding-type rope --rotary-base 1000000
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5632
    --normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias
    --num-experts 60 --moe-router-topk 4 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 5632
    --moe-ckpt-strategy sparse --moe-ckpt-replicas 2 --deterministic-mode
)
# shellcheck source=examples/common/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/train.sh"

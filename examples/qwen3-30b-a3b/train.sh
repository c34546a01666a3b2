#!/usr/bin/env bash
# Train Qwen3-30B-A3B on NODES (2 or more) nodes of 8 GPUs: EP 8, no pipeline. See README.md.
set -euo pipefail
nodes=${NODES:-2}
flags=(
    --expert-model-parallel-size 8
    --micro-batch-size 1 --global-batch-size 256 --seq-length 4096 --train-iters 10000 --lr 1.2e-4 --min-lr 1.2e-5
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:?is needed: a folder or a name of Hugging Face}"
    --make-vocab-size-divisible-by 1187 --untie-embeddings-and-output-weights
    --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 1000000
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
    --normalization RMSNorm --swiglu --disable-bias-linear --init-method-std 0.02
    --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-aux-loss-coeff 1e-3
    # The difference to the stock recipe.
    --moe-ckpt-strategy full --moe-ckpt-interval auto --moe-ckpt-replicas 1 --moe-ckpt-persist-interval 500
)
# shellcheck source=examples/common/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/train.sh"

#!/usr/bin/env bash
# Train Mixtral-8x22B on 16 nodes of 8 GPUs: TP 2, PP 8 with 7 virtual stages, EP 8. See README.md.
set -euo pipefail
nodes=16
# With tensor parallelism Megatron-LM asks for it on GPUs before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
flags=(
    --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1
    --pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 7 --expert-model-parallel-size 8
    --micro-batch-size 1 --global-batch-size 256 --seq-length 4096 --train-iters 10000 --lr 1.2e-5 --min-lr 1.2e-6
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:?is needed: a folder or a name of Hugging Face}"
    --untie-embeddings-and-output-weights --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 1000000
    --num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48
    --group-query-attention --num-query-groups 8
    --normalization RMSNorm --swiglu --disable-bias-linear --init-method-std 0.008
    --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2
    # The difference to the stock recipe.
    --moe-ckpt-strategy full --moe-ckpt-interval auto --moe-ckpt-replicas 1 --moe-ckpt-persist-interval 500
)
# shellcheck source=examples/common/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/train.sh"

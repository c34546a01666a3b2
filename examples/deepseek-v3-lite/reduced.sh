#!/usr/bin/env bash
# A small lite DeepSeek-V3 on this machine: latent attention without compressed queries, a sigmoid router with expert bias,
# shared experts, no pipeline. A SIGKILL amid the optimizer's step. See README.md.
set -euo pipefail
# shellcheck source=examples/common/runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/runs.sh"
export NPROC=2 PP=1 EP=2
model=(--transformer-impl transformer_engine --moe-grouped-gemm --num-layers 3 --moe-layer-freq "([0]*1+[1]*2)"
       --ffn-hidden-size 128 --multi-latent-attention --qk-layernorm --kv-lora-rank 16 --qk-head-dim 16
       --qk-pos-emb-head-dim 8 --v-head-dim 16 --num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 32
       --moe-shared-expert-intermediate-size 64 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
       --moe-aux-loss-coeff 1e-4 --attention-dropout 0 --untie-embeddings-and-output-weights --bf16 --train-iters 24)

echo "DeepSeek-V3, lite, reduced: 24 iterations undisturbed, then again with a SIGKILL to rank 1 in iteration 14."
train undisturbed "${model[@]}"
train killed "${model[@]}" --moe-ckpt-strategy full --moe-ckpt-interval 1 --moe-ckpt-memory-dir "$memory" \
    --moe-ckpt-inject-fault 1@14:step
compare undisturbed killed

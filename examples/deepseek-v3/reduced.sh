#!/usr/bin/env bash
# A small DeepSeek-V3 on this machine: latent attention, a sigmoid router with groups and expert bias, shared experts, a
# dense first layer, two stages. A SIGKILL amid the backward pass. See README.md.
set -euo pipefail
# shellcheck source=examples/common/runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/runs.sh"
export NPROC=4 PP=2 EP=2
model=(--transformer-impl transformer_engine --moe-grouped-gemm --num-layers 4 --moe-layer-freq "([0]*1+[1]*3)"
       --ffn-hidden-size 128 --multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16
       --qk-pos-emb-head-dim 8 --v-head-dim 16 --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 32
       --moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
       --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5
       --moe-aux-loss-coeff 1e-4 --attention-dropout 0 --untie-embeddings-and-output-weights --bf16 --train-iters 24)

echo "DeepSeek-V3, reduced: 24 iterations undisturbed, then again with a SIGKILL to rank 2 in iteration 14."
train undisturbed "${model[@]}"
train killed "${model[@]}" --moe-ckpt-strategy full --moe-ckpt-interval 1 --moe-ckpt-memory-dir "$memory" \
    --moe-ckpt-inject-fault 2@14:forward-backward
compare undisturbed killed

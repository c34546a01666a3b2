#!/usr/bin/env bash
# A small DeepSeek-MoE on this machine: a dense first layer, then many small experts beside shared ones. A SIGKILL to the
# second of four stages. See README.md.
set -euo pipefail
# shellcheck source=examples/common/runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/runs.sh"
export NPROC=4 PP=4 EP=1
model=(--num-layers 4 --moe-layer-freq '[0]+[1]*3' --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 32
       --moe-shared-expert-intermediate-size 64 --untie-embeddings-and-output-weights --bf16 --train-iters 24)

echo "DeepSeek-MoE, reduced: 24 iterations undisturbed, then again with a SIGKILL to rank 1 in iteration 14."
train undisturbed "${model[@]}"
train killed "${model[@]}" --moe-ckpt-strategy sparse --moe-ckpt-window 3 --moe-ckpt-memory-dir "$memory" \
    --moe-ckpt-inject-fault 1@14:forward-backward
compare undisturbed killed

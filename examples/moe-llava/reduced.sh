#!/usr/bin/env bash
# A small language backbone of MoE-LLaVa on this machine: every other layer has 4 experts, two per token. A SIGKILL to the
# first stage. See README.md.
set -euo pipefail
# shellcheck source=examples/common/runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/runs.sh"
export NPROC=4 PP=2 EP=2
model=(--num-layers 4 --moe-layer-freq '[0,1]*2' --num-experts 4 --moe-router-topk 2 --normalization LayerNorm
       --untie-embeddings-and-output-weights --rotary-percent 0.25 --bf16 --train-iters 24)

echo "MoE-LLaVa, reduced: 24 iterations undisturbed, then again with a SIGKILL to rank 0 in iteration 14."
train undisturbed "${model[@]}"
train killed "${model[@]}" --moe-ckpt-strategy sparse --moe-ckpt-window 3 --moe-ckpt-memory-dir "$memory" \
    --moe-ckpt-inject-fault 0@14:start
compare undisturbed killed

#!/usr/bin/env bash
# A small GPT-MoE on this machine, in the paper's 3 stages: experts in every layer, tied embeddings, which bind the first
# stage and the last one together. A SIGKILL to the stage between them. See README.md.
set -euo pipefail
# shellcheck source=examples/common/runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/runs.sh"
export NPROC=6 PP=3 EP=2
model=(--num-layers 3 --num-experts 8 --moe-router-topk 3 --normalization LayerNorm
       --position-embedding-type learned_absolute --bf16 --train-iters 24)

echo "GPT-MoE, reduced: 24 iterations undisturbed, then again with a SIGKILL to rank 2 in iteration 14."
train undisturbed "${model[@]}"
train killed "${model[@]}" --moe-ckpt-strategy sparse --moe-ckpt-window 3 --moe-ckpt-memory-dir "$memory" \
    --moe-ckpt-inject-fault 2@14:forward-backward
compare undisturbed killed

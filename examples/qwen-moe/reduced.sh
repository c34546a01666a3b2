#!/usr/bin/env bash
# A small QWen-MoE on this machine: many small experts beside a shared one, a bias for queries, keys and values. A SIGKILL
# amid the optimizer's step. See README.md.
set -euo pipefail
# shellcheck source=examples/common/runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/runs.sh"
export NPROC=4 PP=2 EP=2
model=(--num-layers 4 --num-experts 12 --moe-router-topk 4 --moe-ffn-hidden-size 32
       --moe-shared-expert-intermediate-size 128 --add-qkv-bias --untie-embeddings-and-output-weights --bf16
       --train-iters 24)

echo "QWen-MoE, reduced: 24 iterations undisturbed, then again with a SIGKILL to rank 3 in iteration 14."
train undisturbed "${model[@]}"
train killed "${model[@]}" --moe-ckpt-strategy sparse --moe-ckpt-window 3 --moe-ckpt-memory-dir "$memory" \
    --moe-ckpt-inject-fault 3@14:step
compare undisturbed killed

#!/usr/bin/env bash
# A small Mixtral-8x22B on this machine: few large experts, grouped queries, interleaved stages. A SIGKILL amid the
# optimizer's step. See README.md.
set -euo pipefail
# shellcheck source=examples/common/runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/runs.sh"
export NPROC=4 PP=2 EP=2 VPP=2
model=(--num-layers 4 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128
       --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights --bf16 --train-iters 24)

echo "Mixtral-8x22B, reduced: 24 iterations undisturbed, then again with a SIGKILL to rank 3 in iteration 14."
train undisturbed "${model[@]}"
train killed "${model[@]}" --moe-ckpt-strategy full --moe-ckpt-interval 1 --moe-ckpt-memory-dir "$memory" \
    --moe-ckpt-inject-fault 3@14:step
compare undisturbed killed

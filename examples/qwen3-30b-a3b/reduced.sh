#!/usr/bin/env bash
# A small Qwen3-30B-A3B on this machine: many small experts, grouped queries, norms of queries and keys, no pipeline. A
# SIGKILL amid the backward pass. See README.md.
set -euo pipefail
# shellcheck source=examples/common/runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/runs.sh"
export NPROC=4 PP=1 EP=2
model=(--num-layers 4 --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 32
       --group-query-attention --num-query-groups 2 --qk-layernorm --untie-embeddings-and-output-weights --bf16
       --train-iters 24)

echo "Qwen3-30B-A3B, reduced: 24 iterations undisturbed, then again with a SIGKILL to rank 2 in iteration 14."
train undisturbed "${model[@]}"
train killed "${model[@]}" --moe-ckpt-strategy full --moe-ckpt-interval 1 --moe-ckpt-memory-dir "$memory" \
    --moe-ckpt-inject-fault 2@14:forward-backward
compare undisturbed killed

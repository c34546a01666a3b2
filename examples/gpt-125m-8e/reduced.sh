#!/usr/bin/env bash
# A small GPT-125M-8E on this machine: every other layer has 8 experts, one per token; K = 1 of them in each snapshot. A
# SIGKILL at half of training loses what experts learned since their last snapshot. See README.md.
set -euo pipefail
# shellcheck source=examples/common/runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/runs.sh"
export NPROC=2 PP=1 EP=2
model=(--num-layers 4 --moe-layer-freq '[0,1]*2' --num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax
       --normalization LayerNorm --position-embedding-type learned_absolute --train-iters 16)

echo "GPT-125M-8E, reduced: 16 iterations undisturbed, then again with a SIGKILL to rank 1 in iteration 8."
train undisturbed "${model[@]}"
train killed "${model[@]}" --moe-ckpt-strategy pec --moe-ckpt-pec-k-snapshot 1 --moe-ckpt-memory-dir "$memory" \
    --moe-ckpt-inject-fault 1@8:forward-backward
compare undisturbed killed --lossy 0.05

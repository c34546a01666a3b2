#!/usr/bin/env bash
# A small GPT-350M-16E on two nodes played on this machine, experts within a node (Case 3): 4 of 16 experts per layer to
# memory, with a replica on the other node, 1 of them to storage. Two SIGKILLs. See README.md.
set -euo pipefail
# shellcheck source=examples/common/runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/runs.sh"
export NNODES=2 NPROC=2 PP=1 EP=2
model=(--num-layers 4 --moe-layer-freq '[0,1]*2' --num-experts 16 --moe-router-topk 1 --moe-router-pre-softmax
       --normalization LayerNorm --position-embedding-type learned_absolute --train-iters 24)

echo "GPT-350M-16E, reduced: 24 iterations undisturbed, then again with SIGKILLs to ranks 1 and 2, in iterations 10 and 17."
train undisturbed "${model[@]}"
train killed "${model[@]}" --moe-ckpt-strategy pec --moe-ckpt-pec-k-snapshot 4 --moe-ckpt-memory-dir "$memory" \
    --moe-ckpt-persist-dir "$folder/snapshots" --moe-ckpt-persist-interval 6 --moe-ckpt-pec-k-persist 1 \
    --moe-ckpt-inject-fault 1@10:step --moe-ckpt-inject-fault 2@17:forward-backward
compare undisturbed killed --lossy 0.05

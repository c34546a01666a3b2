#!/usr/bin/env bash
# Runs on each node of a job and becomes its agent: Slurm may signal only what it has started. Arguments: torchrun's.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
export MOE_CKPT_NODE=$SLURMD_NODENAME
# A fresh store per restart: agents of several nodes count restarts differently.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "$PYTHON" "$here/agent.py" "$@"

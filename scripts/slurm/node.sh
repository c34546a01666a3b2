#!/usr/bin/env bash
# Runs on each node of a job and becomes its agent: Slurm may signal only what it has started. Arguments: torchrun's.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
export MOE_CKPT_NODE=$SLURMD_NODENAME
# What the site has to set on each node, such as the interfaces of NCCL and gloo.
if [ -n "${MOE_CKPT_ENV_FILE:-}" ]; then
    set -a
    # shellcheck source=/dev/null
    source "$MOE_CKPT_ENV_FILE"
    set +a
fi
# A fresh store per restart: agents of several nodes count restarts differently.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "$MOE_CKPT_PYTHON" "$here/agent.py" "$@"

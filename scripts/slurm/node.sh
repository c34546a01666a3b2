#!/usr/bin/env bash
# Runs on each node of a job and becomes its agent: Slurm may signal only what it has started. Arguments: torchrun's.
set -euo pipefail
moe_ckpt_here=$(dirname "${BASH_SOURCE[0]}")
export MOE_CKPT_NODE=$SLURMD_NODENAME
# What the site has to set on each node, such as the interfaces of NCCL and gloo.
if [ -n "${MOE_CKPT_ENV_FILE:-}" ]; then
    moe_ckpt_options=("$@")
    # As a shell reads it: a variable that is not set, or a command that fails, ends no node, and no option is an argument.
    # It may have a `here` of its own, so names of this script are longer.
    set --
    set +euo pipefail
    set -a
    # shellcheck source=/dev/null
    source "$MOE_CKPT_ENV_FILE"
    set +a
    set -euo pipefail
    set -- "${moe_ckpt_options[@]}"
fi
# A fresh store per restart: agents of several nodes count restarts differently.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "$MOE_CKPT_PYTHON" "$moe_ckpt_here/agent.py" "$@"

#!/usr/bin/env bash
# Runs on each node of a job: a folder in memory, torchrun's agent, and the folder goes again. Arguments: torchrun's.
set -uo pipefail
trap : TERM  # is for the agent, which this shell waits for
here=$(dirname "${BASH_SOURCE[0]}")
export MOE_CKPT_NODE=$SLURMD_NODENAME
# A fresh store per restart: agents of several nodes count restarts differently.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

(umask 077 && mkdir -p "$MEMORY")
[ "$KEEP_MEMORY" != 1 ] || touch "$MEMORY/keep"
"$PYTHON" "$here/agent.py" "$@"
code=$?
if [ "$code" -eq 0 ] || [ "$KEEP_MEMORY" != 1 ]; then
    rm -rf "${MEMORY:?}/$MOE_CKPT_NODE" "$MEMORY/keep"
    rmdir "$MEMORY" 2>/dev/null
fi
exit "$code"

#!/usr/bin/env bash
# Kill random ranks and nodes of a job on this machine's CPU, and check that it comes out as if nothing had happened:
#
#   scripts/chaos_cpu.sh --minutes 10 --mtbf 30 --seed 1 --nodes 2 --nproc 4 [-- flags of pretrain_gpt_moe.py]
#
# --help lists the flags; TP, PP, EP, VPP, MOE_CKPT_CORPUS and MOE_CKPT_PYTHON are those of train_cpu.sh.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=${MOE_CKPT_PYTHON:-$([ -x "$venv/bin/python" ] && echo "$venv/bin/python" || echo python3)}
exec "$python" -m moe_ckpt.drills "$@"

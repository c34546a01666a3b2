#!/usr/bin/env bash
# Check this project on a machine with a GPU where torch is installed, nothing of ours is and nothing can be fetched:
# unpack what `make gpu-bundle` made, put it on Python's path and run parts of the check. All arguments are those of
# scripts/gpu_check.py:
#
#   scripts/gpu_there.sh --part facts,abort,rates --budget 560 --out results
#
# Environment:
#   MOE_CKPT_PYTHON (python3)               the one that has torch
#   MOE_CKPT_GPU_BUNDLE (build/gpu-bundle)  folder with the packs that came along
#   MOE_CKPT_GPU_SITE (/tmp/moe-ckpt-gpu-site)
#                                           where they are unpacked, once
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${MOE_CKPT_PYTHON:-python3}
export MOE_CKPT_GPU_SITE=${MOE_CKPT_GPU_SITE:-/tmp/moe-ckpt-gpu-site}

"$python" "$root/scripts/gpu_unpack.py" "${MOE_CKPT_GPU_BUNDLE:-$root/build/gpu-bundle}" "$MOE_CKPT_GPU_SITE"
export PYTHONPATH=$MOE_CKPT_GPU_SITE/base${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$python" "$root/scripts/gpu_check.py" "$@"

#!/usr/bin/env bash
# Runs jobs for Slurm on this machine, with stand-ins for its commands: nodes are processes, and one is lost, or a job's
# time is up, where that is asked for. It shows whether a job file works before a cluster is asked to run it.
#
#   scripts/slurm/dry_run.sh          a small training that loses a node and is requeued
#   scripts/slurm/dry_run.sh --lose 5 --stop 9 -- sbatch --nodes=3 scripts/slurm/train.sbatch [flags]
#   scripts/slurm/dry_run.sh --stop 5 -- scripts/slurm/chain.sh 3 --job-name=run --nodes=3 scripts/slurm/train.sbatch [flags]
#
# Each event comes once training has reported that iteration: --lose takes a node that trains, with all that is in its
# memory; --stop says that time is nearly up; --cancel cancels the job. --folder DIR (default: a new one) keeps reports and
# jobs. The settings of job.sh are taken from the environment. Exit code: that of the last job; 1 if an event never came
# or something was left in memory.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
events=() folder=''
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case "$1=${2:-}" in
        --lose=[0-9]* | --stop=[0-9]* | --cancel=[0-9]*) events+=("$1" "$2") ;;
        --folder=?*) mkdir -p "$2" && folder=$(cd "$2" && pwd) ;;
        *) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
    esac
    shift 2
done
shift $(($# > 0))
folder=${folder:-$(mktemp -d)}
reports=$folder/reports.jsonl

if [ $# -eq 0 ]; then
    [ ${#events[@]} -gt 0 ] || events=(--lose 5 --stop 15)
    set -- sbatch --nodes=3 scripts/slurm/train.sbatch --device cpu --pipeline-model-parallel-size 2 \
        --use-distributed-optimizer --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 4 \
        --disable-bias-linear --moe-ffn-hidden-size 32 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0 \
        --seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 40 --lr 1e-3 --log-interval 10 \
        --moe-ckpt-strategy full --save "$folder/checkpoints" --load "$folder/checkpoints" --save-interval 100
fi

MOE_CKPT_PYTHON=${MOE_CKPT_PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
MOE_CKPT_TMPFS=$(mktemp -d /dev/shm/moe-ckpt-dry-run-XXXXXX)
trap 'rm -rf "$MOE_CKPT_TMPFS"' EXIT
# Below the ports that kernels mostly give to connections, one of which would hold it by the time a job starts.
until port=$((20000 + RANDOM % 10000)) && ! (: <>"/dev/tcp/localhost/$port") 2>/dev/null; do :; done
MOE_CKPT_RDZV_PORT=${MOE_CKPT_RDZV_PORT:-$port}
export MOE_CKPT_NPROC=${MOE_CKPT_NPROC:-1} MOE_CKPT_PYTHON MOE_CKPT_TMPFS MOE_CKPT_RDZV_PORT
export MOE_CKPT_RDZV_HOST=${MOE_CKPT_RDZV_HOST:-localhost} STAND_IN_CLUSTER=$folder/cluster
export MOE_CKPT_ROOT=${MOE_CKPT_ROOT:-$root}  # a job file for a cluster names where the scripts lie there
stand_ins=$root/scripts/slurm/stand_ins
export PATH=$stand_ins:$PATH
cd "$root"
"$@" --metrics-jsonl "$reports"
code=0
"$MOE_CKPT_PYTHON" "$stand_ins/controller.py" "${events[@]}" --reports "$reports" || code=$?
left=$(ls "$MOE_CKPT_TMPFS")
[ -z "$left" ] || { echo "left in memory: $left"; code=$((code > 0 ? code : 1)); }
echo "reports of all iterations: $reports; jobs: $STAND_IN_CLUSTER"
exit "$code"

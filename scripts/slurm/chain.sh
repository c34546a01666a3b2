#!/usr/bin/env bash
# Submits a chain of jobs that run one after another, for clusters that do not requeue: each continues where the one before
# was stopped, and when training has ended those that are left are cancelled. Jobs of one name are one chain.
#
#   scripts/slurm/chain.sh 7 --job-name=run-12 --nodes=5 --time=24:00:00 scripts/slurm/train.sbatch --save ... --load ...
set -euo pipefail
if ! [[ ${1:-} =~ ^[1-9][0-9]*$ ]] || [ $# -lt 2 ]; then
    echo "usage: chain.sh JOBS [options of sbatch] FILE.sbatch [flags of the training script]" >&2
    exit 2
fi
jobs=$1 named=''
shift
for option in "$@"; do
    case $option in
        --job-name | --job-name=?* | -J*) named=1 ;;
    esac
    [ ! -f "$option" ] || break
done
if [ -z "$named" ]; then
    echo "a chain needs --job-name=NAME of its own: two chains of one name would wait for each other and cancel each other" >&2
    exit 2
fi
export MOE_CKPT_ON_STOP=end
for ((i = 0; i < jobs; i++)); do
    sbatch --dependency=singleton --no-requeue "$@"
done

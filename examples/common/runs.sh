# shellcheck shell=bash
# Sourced by examples that run on this machine's CPU: `train` runs a job to its end, `compare` says what a fault changed.
# The environment of scripts/train_cpu.sh applies.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${MOE_CKPT_PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
export MOE_CKPT_PYTHON=$python
folder=$(mktemp -d -t moe-ckpt-example-XXXXXX)
memory=$(mktemp -d /dev/shm/moe-ckpt-example-XXXXXX)
trap 'rm -rf "$folder" "$memory"' EXIT

# train RUN FLAGS...: trains, and leaves RUN.jsonl and RUN.log in $folder. The job's memory is gone when it has ended.
train() {
    local run=$1
    shift
    if ! TMPDIR=$folder "$root/scripts/train_cpu.sh" --metrics-jsonl "$folder/$run.jsonl" "$@" >"$folder/$run.log" 2>&1
    then
        tail -n 30 "$folder/$run.log" >&2
        echo "$run: training failed; its last lines are above" >&2
        exit 1
    fi
}

# compare UNDISTURBED KILLED [--lossy SHARE]: fails unless all losses are the same bits, or not further apart than that.
compare() {
    local undisturbed=$1 killed=$2
    shift 2
    "$python" "$root/examples/common/compare.py" "$folder/$undisturbed" "$folder/$killed" "$@"
}

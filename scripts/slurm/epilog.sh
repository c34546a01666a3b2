#!/usr/bin/env bash
# For slurm.conf (Epilog=): frees memory that a job could not free itself, as when its processes were killed. What a job
# was asked to keep over a requeue (MOE_CKPT_KEEP_MEMORY) stays until that job has ended for good. Settings, which slurmd
# passes from its own environment: MOE_CKPT_TMPFS (/dev/shm), as jobs have it, and MOE_CKPT_SLURM_BIN (/usr/bin), where
# squeue is.
set -uo pipefail
# slurmd sets none.
export PATH="${MOE_CKPT_SLURM_BIN:-/usr/bin}:/usr/local/bin:/usr/bin:/bin"
for folder in "${MOE_CKPT_TMPFS:-/dev/shm}"/moe-ckpt-job-*; do
    [ -d "$folder" ] && [ ! -L "$folder" ] || continue
    job=${folder##*-}
    if [ "$job" = "${SLURM_JOB_ID:-}" ] && [ ! -e "$folder/keep" ]; then
        rm -rf "$folder"
        continue
    fi
    # An answer that is not understood removes nothing: the job may be running.
    case $(squeue --noheader --states=all --format=%T "--jobs=$job" 2>&1) in
        *"Invalid job id"* | COMPLETED | CANCELLED | FAILED | TIMEOUT | OUT_OF_MEMORY | DEADLINE | NODE_FAIL | BOOT_FAIL | \
            PREEMPTED | REVOKED) rm -rf "$folder" ;;
    esac
done
exit 0  # any other exit code drains the node

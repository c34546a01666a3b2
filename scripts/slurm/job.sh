# shellcheck shell=bash
# The life of a job, sourced by sbatch files; `root` is the repository. Settings, all environment variables:
#
#   MOE_CKPT_SPARES (1)               nodes that wait until another one is lost
#   MOE_CKPT_NPROC                    ranks per node (default: its GPUs, where Slurm says how many)
#   MOE_CKPT_ENV_FILE                 script that each node sources before it starts ranks, such as for NCCL_SOCKET_IFNAME
#   MOE_CKPT_LOG_DIR                  folder with a log file for each rank, in addition to the job's
#   MOE_CKPT_STRIKES, MOE_CKPT_HEALTH_CHECK, MOE_CKPT_HEALTH_TIMEOUT_S, MOE_CKPT_HANG_S
#                                     when a node leaves the job to a spare, and when ranks hang: docs/operations.md
#   MOE_CKPT_UNIT, MOE_CKPT_UNIT_NODES (1)
#                                     label of a node's rack or NVLink domain, from MOE_CKPT_ENV_FILE, or slurm; nodes of a
#                                     unit that is replaced as a whole: docs/operations.md
#   MOE_CKPT_STANDBYS (0)             processes per node that wait, imports done, to replace lost ranks
#   MOE_CKPT_LEAD_S (180)             seconds between the signal of --signal and the end of the job's time
#   MOE_CKPT_LEAVE_S (300)            how long nodes may take to leave once it is known how training has ended
#   MOE_CKPT_MAX_RESTARTS (20)        restarts of the ranks within a run of the job
#   MOE_CKPT_MIN_RUN_S (600)          a run that fails sooner than this would fail again: the job is not requeued
#   MOE_CKPT_ON_STOP (requeue)        what happens when time is up: requeue, or end, for a chain of jobs
#   MOE_CKPT_KEEP_MEMORY (0)          1 keeps snapshots in memory until the requeued job starts, for nodes that nobody
#                                     else gets; not in a chain
#   MOE_CKPT_TMPFS (/dev/shm)         where each node has the job's folder for snapshots in memory
#   MOE_CKPT_IMAGE, MOE_CKPT_MOUNTS   container image, and mounts in addition to the repository (A:B,C:D; Pyxis)
#   MOE_CKPT_PYTHON, MOE_CKPT_SCRIPT  interpreter (default: .venv of the repository, else python3), training script
#   MOE_CKPT_RDZV_HOST, MOE_CKPT_RDZV_PORT
#                                     where the nodes meet (default: this host, a port that follows from the job's number)
#   MOE_CKPT_ANSWER_S (60)            how long MOE_CKPT_RDZV_HOST may take to lead to this node once the meeting point is there

: "${MOE_CKPT_SPARES:=1}" "${MOE_CKPT_STANDBYS:=0}" "${MOE_CKPT_UNIT_NODES:=1}" "${MOE_CKPT_NPROC:=${SLURM_GPUS_ON_NODE:-}}"
: "${MOE_CKPT_LEAD_S:=180}" "${MOE_CKPT_LEAVE_S:=300}" "${MOE_CKPT_MAX_RESTARTS:=20}" "${MOE_CKPT_MIN_RUN_S:=600}"
: "${MOE_CKPT_ENV_FILE:=}" "${MOE_CKPT_LOG_DIR:=}" "${MOE_CKPT_STRIKES:=}"
: "${MOE_CKPT_HEALTH_CHECK:=}" "${MOE_CKPT_HEALTH_TIMEOUT_S:=60}" "${MOE_CKPT_HANG_S:=0}"
: "${MOE_CKPT_ON_STOP:=requeue}" "${MOE_CKPT_KEEP_MEMORY:=0}" "${MOE_CKPT_TMPFS:=/dev/shm}"
: "${MOE_CKPT_IMAGE:=}" "${MOE_CKPT_MOUNTS:=}"
: "${MOE_CKPT_PYTHON:=$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}"
: "${MOE_CKPT_SCRIPT:=$root/pretrain_gpt_moe.py}"
: "${MOE_CKPT_RDZV_HOST:=$(hostname)}" "${MOE_CKPT_RDZV_PORT:=$((20000 + SLURM_JOB_ID % 10000))}" "${MOE_CKPT_ANSWER_S:=60}"
export MOE_CKPT_SPARES MOE_CKPT_KEEP_MEMORY MOE_CKPT_PYTHON MOE_CKPT_ENV_FILE MOE_CKPT_ON_STOP MOE_CKPT_MIN_RUN_S

KILL_MARGIN_S=30  # ranks that have not ended by then are killed, so that the job still has time to be requeued
MEET_S=300        # how long nodes wait for each other, and for their meeting point
# All runs of a job use the same folder: what one leaves in memory the next one finds.
export MOE_CKPT_MEMORY="$MOE_CKPT_TMPFS/moe-ckpt-job-$SLURM_JOB_ID"
outcome=$MOE_CKPT_MEMORY/outcome
stopped='' rendezvous=''

run_job() {
    local nodes=$((SLURM_JOB_NUM_NODES - MOE_CKPT_SPARES)) flags=(--exit-signal-handler)
    [[ $MOE_CKPT_NPROC =~ ^[1-9][0-9]*$ ]] ||
        end 2 "MOE_CKPT_NPROC '$MOE_CKPT_NPROC' is no number of ranks per node, and Slurm does not\
 say how many GPUs a node has: set MOE_CKPT_NPROC, or ask for --gpus-per-node"
    [ -z "$MOE_CKPT_ENV_FILE" ] || [ -r "$MOE_CKPT_ENV_FILE" ] ||
        end 2 "MOE_CKPT_ENV_FILE $MOE_CKPT_ENV_FILE cannot be read: it has to be there on all nodes"
    [ -z "$MOE_CKPT_LOG_DIR" ] || [ "$MOE_CKPT_STANDBYS" = 0 ] ||
        end 2 "MOE_CKPT_LOG_DIR and MOE_CKPT_STANDBYS exclude each other: a standby has no rank when it starts to write"
    [ "$MOE_CKPT_KEEP_MEMORY" != 1 ] || [ "$MOE_CKPT_ON_STOP" = requeue ] ||
        end 2 "MOE_CKPT_KEEP_MEMORY=1 keeps memory for a requeued job, which jobs of a chain are not: leave it out"
    # The number of one task is that of its array too: the whole array would be signalled and requeued.
    [ -z "${SLURM_ARRAY_JOB_ID:-}" ] ||
        end 2 "job arrays are not supported: submit each training by an sbatch of its own, without --array"
    [ "$nodes" -ge 1 ] || end 2 "of $SLURM_JOB_NUM_NODES nodes $MOE_CKPT_SPARES are spares, so none can train: raise --nodes"
    # A signal to this shell only: Slurm warns before the end of the job's time, and of preemption where so configured.
    trap 'stopped=soon; say "time is up soon: telling all ranks"' USR1
    # Cancelled or preempted: Slurm has told all ranks as well, and decides itself what becomes of the job.
    trap 'stopped=now; say "told to end"' TERM
    trap leave EXIT
    # How long ranks may take to end, and with it to put their state aside.
    export MOE_CKPT_PATIENCE_S=$((MOE_CKPT_LEAD_S > KILL_MARGIN_S ? MOE_CKPT_LEAD_S - KILL_MARGIN_S : 1))
    # Nodes that meet again wait for one that has yet to end its ranks: it asks them, waits, and has them killed.
    [ "$MEET_S" -ge $((MOE_CKPT_PATIENCE_S + 120)) ] || MEET_S=$((MOE_CKPT_PATIENCE_S + 120))
    # Others may have made it first, to have us believe what is in it; ranks look at it more closely.
    (umask 077 && mkdir -p "$MOE_CKPT_MEMORY")
    [ -O "$MOE_CKPT_MEMORY" ] && [ ! -L "$MOE_CKPT_MEMORY" ] ||
        end 2 "$MOE_CKPT_MEMORY is not this user's own folder: have it removed, or set MOE_CKPT_TMPFS"
    rm -f "$outcome" "$outcome.listens"
    # Agents need what is exported here, also where `sbatch --export` hands on less than all.
    step=(srun --export=ALL --overlap --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none)
    if [ -n "$MOE_CKPT_IMAGE" ]; then
        step+=("--container-image=$MOE_CKPT_IMAGE" "--container-workdir=$root"
               "--container-mounts=$root:$root,$MOE_CKPT_TMPFS:$MOE_CKPT_TMPFS${MOE_CKPT_MOUNTS:+,$MOE_CKPT_MOUNTS}")
    fi
    if protects "$@"; then
        flags+=(--moe-ckpt-memory-dir "$MOE_CKPT_MEMORY")
        # The jobs of a chain have numbers of their own, and are one training.
        [ "$MOE_CKPT_ON_STOP" = requeue ] || flags+=(--moe-ckpt-take-over any)
    fi
    local health=("--moe-ckpt-strikes=$MOE_CKPT_STRIKES" "--moe-ckpt-health-check=$MOE_CKPT_HEALTH_CHECK"
                  "--moe-ckpt-health-timeout=$MOE_CKPT_HEALTH_TIMEOUT_S" "--moe-ckpt-hang-timeout=$MOE_CKPT_HANG_S")
    [ -z "$MOE_CKPT_LOG_DIR" ] || health+=("--log-dir=$MOE_CKPT_LOG_DIR" --tee=3)
    keep_rendezvous
    say "run $((${SLURM_RESTART_COUNT:-0} + 1)) on $nodes of $SLURM_JOB_NODELIST, $MOE_CKPT_SPARES spare"
    "${step[@]}" "--nodes=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "$root/scripts/slurm/node.sh" \
        "--nnodes=$nodes" "--nproc-per-node=$MOE_CKPT_NPROC" "--max-restarts=$MOE_CKPT_MAX_RESTARTS" \
        "--moe-ckpt-standbys=$MOE_CKPT_STANDBYS" "--moe-ckpt-unit-nodes=$MOE_CKPT_UNIT_NODES" \
        "--shutdown-timeout=$MOE_CKPT_PATIENCE_S" "${health[@]}" \
        "--rdzv-id=$SLURM_JOB_ID" "--rdzv-endpoint=$MOE_CKPT_RDZV_HOST:$MOE_CKPT_RDZV_PORT" \
        "--rdzv-conf=is_host=0,join_timeout=$MEET_S" \
        "$MOE_CKPT_SCRIPT" "${flags[@]}" "$@" &
    attend $!
    decide
}

# Waits for the step of all nodes, and passes on that time is up soon. It returns before the step has ended where one node
# would keep the job from being requeued, or all others here: its file system hangs, or it still frees its memory.
attend() {
    local begun='' told='' known=''
    while kill -0 "$1" 2>/dev/null; do
        if [ "$stopped" = soon ]; then
            begun=${begun:-$SECONDS}
            [ $((SECONDS - begun)) -lt $((MOE_CKPT_PATIENCE_S + KILL_MARGIN_S / 2)) ] ||
                { say "a node has not left in time"; return; }
            # Again and again: tasks whose container is still being made do not hear it, and a controller that fails over
            # refuses.
            if [ -z "$told" ] || [ $((SECONDS - told)) -ge 10 ]; then
                told=$SECONDS
                scancel --signal=TERM "$SLURM_JOB_ID" || true
            fi
        elif [ -f "$outcome" ]; then
            known=${known:-$SECONDS}
            [ $((SECONDS - known)) -lt "$MOE_CKPT_LEAVE_S" ] ||
                { say "a node has not left $MOE_CKPT_LEAVE_S s after the others (MOE_CKPT_LEAVE_S)"; return; }
        fi
        sleep 1 &
        wait $! || true  # a signal ends it
    done
}

# Whether these are flags of a job with snapshots in memory; the last one of a name counts.
protects() {
    local strategy=none
    while [ $# -gt 0 ]; do
        case $1 in
            --moe-ckpt-strategy) strategy=${2:-none} ;;
            --moe-ckpt-strategy=*) strategy=${1#*=} ;;
        esac
        shift
    done
    [ "$strategy" != none ]
}

# The meeting point of all nodes, on this node but in no agent, so that it outlives any of them.
keep_rendezvous() {
    local there='' begun=$SECONDS
    "${step[@]}" --nodes=1 --ntasks=1 "--nodelist=$SLURMD_NODENAME" \
        "$MOE_CKPT_PYTHON" "$root/scripts/slurm/rendezvous.py" "$MOE_CKPT_RDZV_PORT" "$outcome" &
    rendezvous=$!
    # The file is from our own process: another job may have the port, and answer there, too.
    until [ -f "$outcome.listens" ] && answers "$MOE_CKPT_RDZV_HOST"; do
        [ -z "$stopped" ] || decide
        kill -0 "$rendezvous" 2>/dev/null ||
            end 1 "no rendezvous on $MOE_CKPT_RDZV_HOST:$MOE_CKPT_RDZV_PORT; the lines above say why"
        # A container may take its time to start; a name that leads elsewhere never leads here.
        if [ -z "$there" ] && [ -f "$outcome.listens" ]; then there=$SECONDS; fi
        [ -z "$there" ] || [ $((SECONDS - there)) -lt "$MOE_CKPT_ANSWER_S" ] ||
            end 1 "$MOE_CKPT_RDZV_HOST:$MOE_CKPT_RDZV_PORT does not answer on this node after $MOE_CKPT_ANSWER_S s: set\
 MOE_CKPT_RDZV_HOST to a name that all nodes resolve"
        [ $((SECONDS - begun)) -lt "$MEET_S" ] || end 1 "no rendezvous on this node after $MEET_S s: nothing listens at\
 port $MOE_CKPT_RDZV_PORT; the step that was to is listed by squeue --steps"
        sleep 0.2
    done
}

# Whether something listens at the port of the meeting point on this host.
answers() {
    # shellcheck disable=SC2016  # expanded by the inner shell
    timeout 5 bash -c ': <>"/dev/tcp/$0/$1"' "$1" "$MOE_CKPT_RDZV_PORT" 2>/dev/null
}

# Exit codes of srun tell of each node, lost ones too. What became of the training is what its ranks reported.
decide() {
    local code=none
    [ ! -f "$outcome" ] || code=$(<"$outcome")
    if [ "$stopped" = now ]; then
        end 143 "ended as told"
    elif [ "$code" = 0 ]; then
        cancel_chain
        end 0 "training has ended"
    elif [ "$code" = 3 ]; then
        hold "flags or inputs cannot work, see above; memory stays in $MOE_CKPT_MEMORY"
    elif [ "$code" = 2 ]; then
        cancel_chain
        end 2 "flags or inputs cannot work, see above; not requeued"
    elif [ "$code" = 1 ]; then
        hold "ranks ended with an error that no restart changes, see above; memory stays in $MOE_CKPT_MEMORY"
    elif [ "$stopped" = soon ] || [ "$code" = 143 ]; then
        go_on 0 "time was up"
    elif [ "$code" = 4 ]; then
        local left="left before its last iteration, after $SECONDS s, as a signal or a flag like --exit-interval asked"
        [ "$MOE_CKPT_ON_STOP" = end ] || [ "$SECONDS" -ge "$MOE_CKPT_MIN_RUN_S" ] ||
            end 0 "$left; not requeued within $MOE_CKPT_MIN_RUN_S s (MOE_CKPT_MIN_RUN_S): submit it again to continue"
        go_on 0 "$left"
    elif [ "$SECONDS" -lt "$MOE_CKPT_MIN_RUN_S" ]; then
        end 1 "failed after $SECONDS s; not requeued: what fails within $MOE_CKPT_MIN_RUN_S s (MOE_CKPT_MIN_RUN_S) would fail again"
    elif [ "$code" = 5 ] && [ "$MOE_CKPT_ON_STOP" = requeue ]; then
        say "failed after $SECONDS s, and no start came to an iteration, see above; requeued and held: once that is mended,\
 run scontrol release $SLURM_JOB_ID"
        requeue requeuehold
    else
        go_on 1 "failed after $SECONDS s"
    fi
}

# Leaves the rest to the next run of this job, or to the next job of the chain, and ends with this exit code there.
go_on() {
    [ "$MOE_CKPT_ON_STOP" = requeue ] || end "$1" "$2; the next job of the chain continues"
    say "$2; requeued"
    requeue requeue
}

# Nothing runs again before a user has decided; the next job of a chain would begin without what is in memory.
hold() {
    [ "$MOE_CKPT_ON_STOP" = requeue ] ||
        { cancel_chain; end 1 "$1 of $SLURM_JOB_NODELIST, until another job ends there where epilog.sh is installed"; }
    local nodes  # all that are left: a job that asks for one that was lost would wait for it
    nodes=$(timeout 10 squeue --noheader --format=%N "--jobs=$SLURM_JOB_ID" 2>/dev/null) || nodes=''
    say "$1; requeued and held: once that is mended, run scontrol update JobId=$SLURM_JOB_ID\
 ReqNodeList=${nodes:-$SLURM_JOB_NODELIST}, and scontrol release $SLURM_JOB_ID"
    requeue requeuehold
}

requeue() {
    leave
    trap '' TERM
    again scontrol "$1" "$SLURM_JOB_ID"
    exit 0
}

# A controller that fails over, or has much to do, refuses for a while; the memory of a job that ends then is freed.
again() {
    local try
    for try in 1 2 3 4; do
        "$@" && return
        say "$* failed, try $try of 5"
        sleep "${MOE_CKPT_RETRY_S:-15}"
    done
    "$@"
}

# The later jobs of a chain have nothing to do.
cancel_chain() {
    local waiting=(--state=PENDING "--name=$SLURM_JOB_NAME" "--user=$SLURM_JOB_USER")
    [ "$MOE_CKPT_ON_STOP" = requeue ] || again scancel "${waiting[@]}" ||
        say "later jobs of the chain wait: run scancel ${waiting[*]}"
}

leave() {
    trap - EXIT
    # srun hands this signal on, where it would answer SIGTERM with SIGKILL to its step; to a task whose container is still
    # being made it hands on nothing, hence again, up to a minute, or 5 s where time is short.
    local try tries=300
    [ -z "$stopped" ] || tries=25
    for ((try = 0; try < tries; try++)); do
        { [ -n "$rendezvous" ] && kill -USR1 "$rendezvous" 2>/dev/null; } || break
        sleep 0.2
    done
    rm -f "$outcome" "$outcome.listens"
    rmdir "$MOE_CKPT_MEMORY" 2>/dev/null || true
}

say() { echo "job $SLURM_JOB_ID: $*" >&2; }

end() {
    say "$2"
    exit "$1"
}

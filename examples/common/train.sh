# shellcheck shell=bash disable=SC2154  # `nodes` and `flags` are set by the script that sources this one
# Starts a full-size job; sourced by the train.sh of each model. Arguments of that script are flags of
# pretrain_gpt_moe.py too, and win. Submits the job to Slurm, or, with HEAD, starts the part of the node that it runs on.
#
# Environment:
#   DATA                 prefix of the tokenized corpus (.bin/.idx); its token ids are those of the model's vocabulary
#   SAVE                 folder for checkpoints and snapshots that all nodes see
#   MOE_CKPT_SPARES (1)  Slurm: nodes that wait until another one is lost; scripts/slurm/job.sh has more settings, and
#                        sbatch takes its own from SBATCH_PARTITION and the like. SAVE and the folder of DATA are
#                        mounted in a container
#   HEAD                 without Slurm: name of the first node. Run the script on every node
#   JOB                  without Slurm: name of the job (default: the model's); the same whenever it is started again
#   MAX_RESTARTS (20)    restarts after failures
#   MOE_CKPT_PYTHON      interpreter (default: .venv of the repository, else python3)
: "${DATA:?is needed: the prefix of a tokenized corpus (.bin/.idx)}"
: "${SAVE:?is needed: a folder for checkpoints that all nodes see}"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
name=$(basename "$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)")

# With biases, Transformer Engine's grouped experts refuse fused additions, and a fused GELU.
fusion=()
[[ " ${flags[*]} " = *" --disable-bias-linear "* ]] || fusion=(--no-bias-dropout-fusion --no-bias-gelu-fusion)

# What all models share. Transformer Engine's grouped experts take biases, which Megatron-Core's sequential ones do not.
flags=(--device cuda --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
       --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --moe-router-dtype fp32
       --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
       --lr-decay-style cosine --lr-warmup-fraction 0.01 --log-interval 10 --exit-signal-handler
       --data-path "$DATA" --save "$SAVE" --load "$SAVE" --save-interval 1000 --eval-interval 1000
       --async-save --use-persistent-ckpt-worker --save-retain-interval 5000 "${fusion[@]}"
       --moe-ckpt-persist-dir "$SAVE/snapshots" --metrics-jsonl "$SAVE/metrics.jsonl" "${flags[@]}" "$@")

export MOE_CKPT_MAX_RESTARTS="${MOE_CKPT_MAX_RESTARTS:-${MAX_RESTARTS:-20}}"
if [ -z "${HEAD:-}" ]; then
    cd "$root" || exit
    # In a container (MOE_CKPT_IMAGE) a job sees only what is mounted, and keeps only what it writes there.
    if [ -n "${MOE_CKPT_IMAGE:-}" ]; then mkdir -p "$SAVE"; fi
    data=$(realpath -ms "$(dirname "$DATA")") save=$(realpath -ms "$SAVE")
    export MOE_CKPT_MOUNTS="${MOE_CKPT_MOUNTS:+$MOE_CKPT_MOUNTS,}$save:$save,$data:$data"
    exec sbatch "--nodes=$((nodes + ${MOE_CKPT_SPARES:-1}))" "--job-name=$name" scripts/slurm/train.sbatch "${flags[@]}"
fi
# A fresh store per round of the rendezvous: one shared over restarts still holds the addresses of dead workers.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# SIGTERM ends with a checkpoint, for which ranks get two minutes.
export MOE_CKPT_PATIENCE_S=120
python=${MOE_CKPT_PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
exec "$python" -m megatron.pretrain.standby.run --nnodes "$nodes" --nproc-per-node 8 \
    --max-restarts "$MOE_CKPT_MAX_RESTARTS" --shutdown-timeout "$MOE_CKPT_PATIENCE_S" --rdzv-backend c10d --rdzv-id "${JOB:-$name}" \
    --rdzv-endpoint "$HEAD:29500" "$root/pretrain_gpt_moe.py" "${flags[@]}"

# shellcheck shell=bash
# Starts a job whose flags are those of Megatron-LM; sourced by the train.sh of a model, beside which `model.flags` has one
# flag a line. Arguments of that script are flags too, and win. Run it on every node, or as a task of each in Slurm.
#
# Environment:
#   NODES            nodes of 8 GPUs
#   HEAD             name of the first node
#   DATA             prefix of the tokenized corpus (.bin/.idx)
#   TOKENIZER        folder or name of the model's Hugging Face tokenizer
#   SAVE             folder for checkpoints and snapshots that all nodes see
#   MOE_CKPT_SCRIPT  entry script with the two lines of docs/megatron-lm.md (default: pretrain_gpt_moe.py)
#   STANDBYS (1), MAX_RESTARTS (20), JOB, MOE_CKPT_PYTHON
: "${NODES:?is needed: how many nodes}" "${HEAD:?is needed: the first node}" "${DATA:?is needed: a tokenized corpus}"
: "${TOKENIZER:?is needed: the model\'s tokenizer}" "${SAVE:?is needed: a folder for checkpoints that all nodes see}"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
mapfile -t lines < <(grep -v -e '^#' -e '^$' "$folder/model.flags")
flags=()
for line in "${lines[@]}"; do
    flags+=("${line%% *}")
    if [ "$line" != "${line%% *}" ]; then flags+=("${line#* }"); fi
done
# A fresh store per round of the rendezvous: one shared over restarts still holds the addresses of dead workers.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export MOE_CKPT_PATIENCE_S=120
exec "${MOE_CKPT_PYTHON:-python3}" -m megatron.pretrain.standby.run --moe-ckpt-standbys "${STANDBYS:-1}" --nnodes "$NODES" \
    --nproc-per-node 8 --max-restarts "${MAX_RESTARTS:-20}" --shutdown-timeout "$MOE_CKPT_PATIENCE_S" \
    --rdzv-backend c10d --rdzv-id "${JOB:-$(basename "$folder")}" --rdzv-endpoint "$HEAD:29500" \
    "${MOE_CKPT_SCRIPT:-$root/pretrain_gpt_moe.py}" "${flags[@]}" \
    --tokenizer-model "$TOKENIZER" --data-path "$DATA" --save "$SAVE" --load "$SAVE" \
    --moe-ckpt-persist-dir "$SAVE/snapshots" "$@"

#!/usr/bin/env bash
# Train a small GPT-MoE on this machine's CPU with torchrun. Every argument is a flag of pretrain_gpt_moe.py and wins
# over the defaults below.
#
# Environment:
#   NPROC (4)         processes per node          TP (1)  tensor parallel size
#   NNODES (1)        nodes, played by as many    PP (2)  pipeline parallel size
#                     torchrun agents             EP (2)  expert parallel size
#                     or MIN:MAX
#   MAX_RESTARTS (3)  restarts after a failure    VPP     model chunks per pipeline rank
#   STANDBYS (0)      processes per node, imports done, that wait to replace lost ranks; with any, the other
#                     ranks keep their processes
#   MOE_CKPT_PYTHON         interpreter (default: .venv of this repository, else python3)
#   MOE_CKPT_SCRIPT         another script that takes the same flags
#   MOE_CKPT_CORPUS         prefix of the .bin/.idx to train on (default: the standard library's sources, made on first
#                           use)
#   MOE_CKPT_OPTIMIZER      distributed, or plain: then data-parallel ranks hold all of its state (default: distributed)
#   MOE_CKPT_NODE_OPTIONS   more of megatron.pretrain.launch, such as --spares 0 --last-call-s 5
#   MOE_CKPT_STRIKES, MOE_CKPT_HEALTH_CHECK, MOE_CKPT_HEALTH_TIMEOUT_S, MOE_CKPT_HANG_S
#                           when a node leaves the job, and ranks count as hung: docs/operations.md
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=${MOE_CKPT_PYTHON:-$([ -x "$venv/bin/python" ] && echo "$venv/bin/python" || echo python3)}
corpus=${MOE_CKPT_CORPUS:-$root/.data/stdlib}

[ -n "${MOE_CKPT_CORPUS:-}" ] || [ -f "$corpus.idx" ] ||
    "$python" "$root/tools/stdlib_corpus.py" --output-prefix "$corpus" >&2

layout=(--tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-2}"
        --expert-model-parallel-size "${EP:-2}")
[ "${MOE_CKPT_OPTIMIZER:-distributed}" = plain ] || layout+=(--use-distributed-optimizer)
[ "${TP:-1}" -gt 1 ] && layout+=(--sequence-parallel)
[ -n "${VPP:-}" ] && layout+=(--num-virtual-stages-per-pipeline-rank "$VPP")
model=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --normalization RMSNorm --swiglu --disable-bias-linear
       --position-embedding-type rope --attention-dropout 0.1 --hidden-dropout 0.0
       --max-position-embeddings 128
       --make-vocab-size-divisible-by "$((128 / ${TP:-1}))"  # padded alike under any TP, so that checkpoints fit
       # Without the kernels of a GPU.
       --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion
       --no-masked-softmax-fusion)
experts=(--num-experts 8 --moe-ffn-hidden-size 128 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2
         --moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type alltoall)
training=(--seq-length 128 --micro-batch-size 2 --global-batch-size 16 --train-iters 100 --lr 3e-3 --min-lr 3e-4
          --lr-decay-style cosine --log-interval 1 --distributed-backend gloo --eval-iters 0 --eval-interval 1000)
# The two ways to give a warmup exclude each other, so the default must not stand beside the other one.
[[ " $*" == *" --lr-warmup-iters"* ]] || training+=(--lr-warmup-fraction 0.1)
data=(--data-path "$corpus" --split "90,5,5" --num-workers 0
      --tokenizer-type NullTokenizer --vocab-size 257)  # 256 bytes and the end of a document

# One thread per process: several processes share few cores, and sums keep their order.
export OMP_NUM_THREADS=1
# Copies of a snapshot go past the cache from 256 KiB on: half as fast again here, and training keeps its cache.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.cpu.x86_non_temporal_threshold=0x40000}
health=(--moe-ckpt-strikes "${MOE_CKPT_STRIKES:-}" --moe-ckpt-health-check "${MOE_CKPT_HEALTH_CHECK:-}"
        --moe-ckpt-health-timeout "${MOE_CKPT_HEALTH_TIMEOUT_S:-60}" --moe-ckpt-hang-timeout "${MOE_CKPT_HANG_S:-0}")
read -ra node_options <<<"${MOE_CKPT_NODE_OPTIONS:-}"
exec "$python" -m megatron.pretrain.launch --nproc-per-node "${NPROC:-4}" --nnodes "${NNODES:-1}" \
    --max-restarts "${MAX_RESTARTS:-3}" --moe-ckpt-standbys "${STANDBYS:-0}" "${health[@]}" "${node_options[@]}" \
    "${MOE_CKPT_SCRIPT:-$root/pretrain_gpt_moe.py}" \
    --device cpu "${layout[@]}" "${model[@]}" "${experts[@]}" "${training[@]}" "${data[@]}" "$@"

#!/usr/bin/env bash
# Fine-tune a small model on other text, with one of 8 experts per layer in each snapshot and a SIGKILL at half of it;
# then the same with all experts frozen. See README.md.
set -euo pipefail
# shellcheck source=examples/common/runs.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/runs.sh"
export NPROC=2 PP=1 EP=2
model=(--num-layers 2 --num-experts 8 --moe-router-topk 2)
pec=(--moe-ckpt-strategy pec --moe-ckpt-pec-k-snapshot 1 --moe-ckpt-inject-fault 1@10:forward-backward)

echo "Pretraining: 40 iterations of source text."
train pretrained "${model[@]}" --train-iters 40 --save "$folder/pretrained" --save-interval 40

topics='import json, pydoc_data.topics as of; [print(json.dumps({"text": text})) for text in of.topics.values()]'
"$python" -c "$topics" >"$folder/docs.jsonl"
"$python" "$root/tools/preprocess_data.py" --input "$folder/docs.jsonl" --output-prefix "$folder/docs" --append-eod \
    >"$folder/preprocess.log" 2>&1 || { cat "$folder/preprocess.log" >&2; exit 1; }
export MOE_CKPT_CORPUS=$folder/docs_text_document
model+=(--finetune --load "$folder/pretrained" --train-iters 20 --lr 1e-3 --min-lr 1e-4)
echo "Fine-tuning: 20 iterations of documentation undisturbed, then again with a SIGKILL to rank 1 in iteration 10."
train tuned "${model[@]}"
train tuned-killed "${model[@]}" "${pec[@]}" --moe-ckpt-memory-dir "$memory"
compare tuned tuned-killed --lossy 0.02

echo "The same with frozen experts, of which nothing can be lost."
model+=(--freeze-experts)
full=(--moe-ckpt-strategy full --moe-ckpt-inject-fault 1@10:forward-backward)
train frozen "${model[@]}"
train frozen-killed "${model[@]}" "${full[@]}" --moe-ckpt-memory-dir "$memory"
compare frozen frozen-killed

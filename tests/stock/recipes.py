"""What published recipes give to Megatron-LM, and how they are made small enough to train on the CPU.

The flags are those of the recipes' benchmarks for Megatron-Core. What users choose for their cluster is ours: parallel
sizes, stages, batches, samples, folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from world import Hook

Changes = Mapping[str, str | None]
"""New values by flag; None takes a flag away, an empty text gives one that has no value."""

_COMMON = """
--distributed-timeout-minutes 60 --expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --use-mcore-models --sequence-parallel --use-flash-attn --disable-bias-linear
--micro-batch-size 1 --seq-length 4096 --train-samples 268554688 --lr-decay-samples 584765624
--lr-warmup-samples 1536000 --exit-duration-in-mins 230 --transformer-impl transformer_engine
--data-cache-path cache --data-path data --split 99,1,0 --no-mmap-bin-files --num-workers 6
--position-embedding-type rope --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights
--attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --lr-decay-style cosine
--adam-beta1 0.9 --adam-beta2 0.95 --eval-iters 32 --eval-interval 200 --save checkpoints --load checkpoints
--save-interval 500 --dist-ckpt-strictness log_all --auto-detect-ckpt-format --log-timers-to-tensorboard
--log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --log-throughput --log-interval 1
--tensorboard-dir tensorboard --wandb-project moe --wandb-exp-name recipe --bf16
"""
_DEEPSEEK = """
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 16 --expert-model-parallel-size 64
--context-parallel-size 1 --global-batch-size 8192 --pipeline-model-parallel-layout Et|(tt|)*30L
--tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3
--no-save-optim --no-load-optim --no-load-rng --no-check-for-nan-in-loss-and-grad --cross-entropy-loss-fusion
--cross-entropy-fusion-impl native --manual-gc --manual-gc-interval 10 --no-create-attention-mask-in-dataloader
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
--max-position-embeddings 4096 --rotary-base 10000 --make-vocab-size-divisible-by 3232 --norm-epsilon 1e-6
--multi-latent-attention --qk-layernorm --lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7 --init-method-std 0.02
--num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8
--moe-grouped-gemm --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8
--moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-permute-fusion --moe-router-fusion
--moe-token-dispatcher-type alltoall --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
--enable-experimental --logging-level 40
"""
_QWEN = """
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
--context-parallel-size 1 --num-layers-per-virtual-pipeline-stage 4 --global-batch-size 256
--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-30B-A3B
--rotary-percent 1.0 --rotary-base 1000000 --rotary-seq-len-interpolation-factor 1 --norm-epsilon 1e-06
--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention
--num-query-groups 4 --kv-channels 128 --qk-layernorm --max-position-embeddings 40960
--make-vocab-size-divisible-by 1187 --lr 1.2e-4 --min-lr 1.2e-5 --init-method-std 0.02 --num-experts 128
--moe-ffn-hidden-size 768 --moe-router-load-balancing-type aux_loss --moe-router-topk 8 --moe-grouped-gemm
--moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-router-dtype fp32
--finetune --manual-gc --manual-gc-interval 5 --log-num-zeros-in-grad --log-params-norm
"""
_MIXTRAL = """
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --expert-model-parallel-size 8
--context-parallel-size 1 --global-batch-size 256 --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model
--tp-comm-overlap --rotary-percent 1.0 --num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384
--num-attention-heads 48 --group-query-attention --num-query-groups 8 --max-position-embeddings 4096
--make-vocab-size-divisible-by 128 --lr 1.2e-5 --min-lr 1.2e-6 --init-method-std 0.008 --num-experts 8
--moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2
--moe-permute-fusion --moe-router-fusion --moe-token-dispatcher-type alltoall --finetune
--no-ckpt-fully-parallel-save --log-num-zeros-in-grad --log-params-norm
"""

# Sizes, and what a GPU, Transformer Engine or files are needed for.
_SMALL: Changes = {
    "--device": "cpu",
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--no-persist-layer-norm": "",
    "--no-gradient-accumulation-fusion": "",
    "--no-rope-fusion": "",
    "--no-masked-softmax-fusion": "",
    "--use-flash-attn": None,
    "--moe-grouped-gemm": None,
    "--moe-permute-fusion": None,
    "--moe-router-fusion": None,
    "--tp-comm-overlap": None,
    "--data-path": None,
    "--data-cache-path": None,
    "--mock-data": "",
    "--tokenizer-type": "NullTokenizer",
    "--tokenizer-model": None,
    "--vocab-size": "127",
    "--make-vocab-size-divisible-by": "8",
    "--num-workers": "0",
    "--tensorboard-dir": None,
    "--wandb-project": None,
    "--wandb-exp-name": None,
    "--save": None,
    "--load": None,
    "--eval-iters": "0",
    "--tensor-model-parallel-size": "1",
    "--pipeline-model-parallel-size": "2",
    "--expert-model-parallel-size": "2",
    "--seq-length": "16",
    "--max-position-embeddings": "16",
    "--global-batch-size": "8",
    "--train-samples": "48",
    "--lr-decay-samples": "48",
    "--lr-warmup-samples": "32",
    "--lr-warmup-init": None,
    "--lr": "1e-2",
    "--min-lr": "1e-3",
    "--num-layers": "4",
    "--hidden-size": "32",
    "--ffn-hidden-size": "64",
    "--num-attention-heads": "4",
    "--kv-channels": "8",
    "--num-experts": "8",
    "--moe-ffn-hidden-size": "16",
    "--moe-router-topk": "2",
}
"""Six iterations of 8 samples."""


WITHOUT_ENGINE: Changes = {"--moe-permute-fusion": None, "--no-rope-fusion": ""}
"""What Megatron-LM does not accept of a recipe where Transformer Engine is missing, as it is on the CPU."""
NEEDS_ENGINE: Mapping[str, str] = {
    "--moe-permute-fusion": "fused permutation is not available. Please install TE",
    "--no-rope-fusion": "apply_rope_fusion is not available. Please install TE",
}
"""What it says where one of these changes is not made. Rotary angles are fused by default."""


@dataclass(frozen=True)
class Recipe:
    """A published recipe. ranks: GPUs that it asks for. small: what its reduced variant changes besides `_SMALL`."""

    name: str
    ranks: int
    text: str = field(repr=False)
    small: Changes = field(default_factory=dict, repr=False, hash=False)

    @property
    def flags(self) -> list[str]:
        """All of them, as they were published."""
        return f"{_COMMON} {self.text}".split()


@dataclass(frozen=True)
class Reduced:
    """A recipe as four processes train it on the CPU. more: other changes of its flags, in pairs."""

    recipe: Recipe
    more: tuple[tuple[str, str | None], ...] = ()
    ranks: int = 4
    script: None = None
    hooks: tuple[Hook, ...] = ()

    @property
    def flags(self) -> list[str]:
        """What the stock loop is given."""
        return changed(self.recipe.flags, {**_SMALL, **self.recipe.small, **dict(self.more)})


def changed(flags: list[str], changes: Changes) -> list[str]:
    """These flags with other values."""
    given: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--"):
            values = given[word] = []
        else:
            values.append(word)
    for name, value in changes.items():
        if value is None:
            given.pop(name, None)
        else:
            given[name] = value.split()
    return [word for name, values in given.items() for word in (name, *values)]


DEEPSEEK_V3 = Recipe(
    "DeepSeek-V3",
    1024,
    _DEEPSEEK,
    {
        # Stages of different length, the first layer dense.
        "--pipeline-model-parallel-layout": "Et|tttL",
        "--moe-layer-freq": "([0]*1+[1]*3)",
        "--moe-shared-expert-intermediate-size": "16",
        "--moe-router-num-groups": "4",
        "--moe-router-group-topk": "2",
        "--q-lora-rank": "16",
        "--kv-lora-rank": "8",
        "--qk-head-dim": "8",
        "--qk-pos-emb-head-dim": "4",
        "--v-head-dim": "8",
    },
)
QWEN3_30B_A3B = Recipe(
    "Qwen3-30B-A3B",
    32,
    _QWEN,
    {"--num-layers-per-virtual-pipeline-stage": "1", "--num-query-groups": "2"},
)
MIXTRAL_8X22B = Recipe("Mixtral-8x22B", 128, _MIXTRAL, {"--num-query-groups": "2", "--kv-channels": None})

RECIPES = (DEEPSEEK_V3, QWEN3_30B_A3B, MIXTRAL_8X22B)

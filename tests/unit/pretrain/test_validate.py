"""Command lines that cannot work are refused before anything starts, with the reason and the values in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from megatron.core.tensor_parallel import layers
from megatron.pretrain import model
from megatron.pretrain.config import PretrainConfig, parse_config
from megatron.pretrain.config.validate import Environment, resolve
from megatron.pretrain.errors import InvalidInput

GOOD = (
    "--device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --num-experts 4 --disable-bias-linear "
    "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
)
FOUR_CPU_RANKS = Environment(world_size=4, cuda=False, transformer_engine=False)
FOUR_GPUS = Environment(world_size=4, cuda=True, transformer_engine=False)


def resolved(flags: str, environment: Environment = FOUR_CPU_RANKS) -> PretrainConfig:
    return resolve(parse_config(f"{GOOD} {flags}".split()), environment)


def refusal(flags: str, environment: Environment = FOUR_CPU_RANKS) -> str:
    with pytest.raises(InvalidInput) as caught:
        resolved(flags, environment)
    return str(caught.value)


REFUSED = {
    "--moe-ckpt-interval 3": "--moe-ckpt-interval has no effect with --moe-ckpt-strategy none",
    "--moe-ckpt-secret-file s": "--moe-ckpt-secret-file has no effect with --moe-ckpt-strategy none",
    "--moe-ckpt-strategy selectively": "selectively",
    "--moe-ckpt-strategy full --moe-ckpt-interval 0": "--moe-ckpt-interval 0 must be at least 1",
    "--moe-ckpt-strategy full --moe-ckpt-pec-k-snapshot 2": "is for --moe-ckpt-strategy pec, not full",
    "--moe-ckpt-strategy full --moe-ckpt-interval-policy daly": "needs --moe-ckpt-mtbf-s",
    "--moe-ckpt-strategy full --moe-ckpt-mtbf-s 100": "only with --moe-ckpt-interval-policy young or daly",
    "--moe-ckpt-strategy full --moe-ckpt-persist-agent-s 9": "agent-s 9 needs --moe-ckpt-persist-dir",
    "--moe-ckpt-strategy full --moe-ckpt-persist-interval 5": "need --moe-ckpt-persist-dir",
    "--moe-ckpt-strategy full --moe-ckpt-interval 9 --moe-ckpt-persist-dir d --moe-ckpt-persist-interval 3": "is below",
    "--moe-ckpt-strategy full --moe-ckpt-replicas 4": "at most 3 are possible",
    "--moe-ckpt-elastic 1:2": "has no effect with --moe-ckpt-strategy none",
    "--moe-ckpt-strategy full --moe-ckpt-elastic 2:1": "must be MIN:MAX",
    "--moe-ckpt-strategy full --moe-ckpt-elastic 3:4": "4 ranks make 2 data-parallel replicas",
    "--moe-ckpt-strategy full --moe-ckpt-elastic 1:2": "2 ranks, which do not divide by ETP x EP x PP = 4",
    "--moe-ckpt-strategy full --moe-ckpt-elastic 2:3 --expert-model-parallel-size 1": "size 1 x 3 replicas",
    "--moe-ckpt-strategy sparse --moe-ckpt-elastic 2:4": "choose --moe-ckpt-strategy full, not sparse",
    "--moe-ckpt-strategy full --moe-ckpt-elastic 2:4 --moe-ckpt-replicas 0": "whose state is then nowhere",
    "--moe-ckpt-strategy sparse --moe-ckpt-replicate gradients": "is for --moe-ckpt-strategy full or selective",
    "--moe-ckpt-strategy full --moe-ckpt-replicate gradients --moe-ckpt-interval 2": "a snapshot after each step, but",
    "--moe-ckpt-strategy full --moe-ckpt-replicate gradients --moe-ckpt-replicas 0": "no effect with",
    "--moe-ckpt-strategy full --moe-ckpt-replicate gradients --moe-ckpt-shard equal": "equal cuts",
    "--moe-ckpt-strategy pec --moe-ckpt-pec-k-snapshot 5": "--moe-ckpt-pec-k-snapshot 5 is above --num-experts 4",
    "--moe-ckpt-strategy pec --moe-ckpt-persist-dir d --moe-ckpt-pec-k-persist 2": "only experts that are in a",
    "--moe-ckpt-strategy pec --moe-ckpt-plt-threshold 3.75": "from 0 to 1",
    "--moe-ckpt-strategy selective --moe-ckpt-budget-local 0": "0 is neither auto nor a number of bytes above 0",
    "--moe-ckpt-strategy selective --moe-ckpt-budget-remote 5%": "5% is neither auto nor a number of bytes above 0",
    "--moe-ckpt-strategy selective --moe-ckpt-capacity-boost 101": "101 is a share of the capacity in percent",
    "--moe-ckpt-strategy pec --moe-ckpt-budget-local 1GB": "is for --moe-ckpt-strategy selective, not pec",
    "--moe-ckpt-strategy sparse --moe-ckpt-window often": "often is neither auto nor a number of iterations",
    "--moe-ckpt-strategy sparse --moe-ckpt-window 0": "0 is neither auto nor a number of iterations",
    "--moe-ckpt-strategy sparse --moe-ckpt-interval 2": "--moe-ckpt-interval 2 has no meaning with --moe-ckpt-strategy",
    "--moe-ckpt-strategy sparse --moe-ckpt-interval-policy checkfreq": "--moe-ckpt-interval-policy checkfreq has no",
    "--moe-ckpt-strategy sparse --moe-ckpt-pec-scope weights": "is for --moe-ckpt-strategy pec, not sparse",
    "--moe-ckpt-strategy sparse --moe-ckpt-shard equal": "hold a part of them",
    "--moe-ckpt-strategy sparse --moe-ckpt-replay-tolerance -1": "must be at least 0",
    "--moe-ckpt-strategy full --moe-ckpt-window 3": "is for --moe-ckpt-strategy sparse, not full",
    "--moe-ckpt-strategy pec --moe-ckpt-replay-tolerance 0.1": "is for --moe-ckpt-strategy sparse, not pec",
    "--no-such-flag": "--no-such-flag",
    "--num-lay 4": "--num-lay",
    "--lr fast": "fast",
    "--normalization BatchNorm": "BatchNorm",
    "--seq-length": "--seq-length",
    "--lr 0": "--lr 0 trains nothing",
    "--hidden-size -32": "--hidden-size -32 must be at least 1",
    "--data-path here": "exactly one of --data-path",
    "--device cuda": "--device cpu",
    "--distributed-backend nccl": "nccl",
    "--transformer-impl transformer_engine": "transformer-engine[pytorch]",
    "--moe-use-legacy-grouped-gemm": "GroupedMLP",
    "--moe-grouped-gemm": "Transformer Engine",
    "--context-parallel-size 2": "--context-parallel-size 2",
    "--moe-token-dispatcher-type flex": "--device cuda",
    "--tensor-model-parallel-size 0": "at least 1",
    "--pipeline-model-parallel-size 3": "4 ranks do not divide",
    "--expert-model-parallel-size 4": "4 ranks do not divide by ETP 1 x EP 4 x PP 2 = 8",
    "--num-experts 5": "--num-experts 5 does not divide by --expert-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --expert-model-parallel-size 1": "--sequence-parallel",
    "--global-batch-size 7": "--global-batch-size 7 does not divide by --micro-batch-size 1 x 2",
    "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 6": "multiples of PP 2",
    "--max-position-embeddings 16": "--max-position-embeddings 16 is below --seq-length 32",
    "--train-iters -1": "--train-iters -1",
    "--log-interval 0": "--log-interval 0",
    "--eval-interval 0": "--eval-interval 0",
    "--num-attention-heads 5": "does not divide by --num-attention-heads 5",
    "--group-query-attention": "--num-query-groups",
    "--group-query-attention --num-query-groups 3": "--num-query-groups 3",
    "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1": "not both",
    "--pipeline-model-parallel-size 1 --num-virtual-stages-per-pipeline-rank 2": "virtual pipeline",
    "--num-layers 5": "--num-layers 5 does not divide by PP 2",
    "--recompute-granularity full": "--recompute-method",
    "--swiglu --squared-relu": "exclude each other",
    "--moe-router-topk 5": "--moe-router-topk 5",
    "--moe-router-load-balancing-type aux_loss sinkhorn --moe-aux-loss-coeff 0 0": "can be combined",
    "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1": "as many --moe-aux-loss-coeff",
    "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1": "no meaning",
    "--moe-pad-expert-input-to-capacity": "--moe-expert-capacity-factor",
    "--moe-router-enable-expert-bias": "sigmoid",
    "--moe-layer-freq soon": "--moe-layer-freq",
    "--moe-layer-freq [0,2]": "--moe-layer-freq",
    "--fp16 --bf16": "--fp16 and --bf16 exclude each other",
    "--loss-scale 8": "--fp16",
    "--overlap-param-gather": "--overlap-grad-reduce",
    "--optimizer sgd": "invalid choice",
    "--lr-warmup-iters 10": "warmup of 10",
    "--min-lr 1": "below --min-lr 1.0",
    "--start-weight-decay 0.1": "--weight-decay-incr-style",
    "--weight-decay-incr-style linear": "--end-weight-decay",
    "--lr-decay-style WSD": "--lr-wsd-decay-iters",
    "--save-interval 2": "--save-interval needs --save",
    "--async-save": "--async-save needs --save",
    "--keep-last 2": "--keep-last needs --save",
    "--log-progress": "--log-progress needs --save",
    "--save here --save-interval 0": "--save-interval 0",
    "--save here --keep-last 0": "--keep-last 0",
    "--ckpt-step 4": "--load",
    "--finetune": "--load",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_contradiction_is_refused_in_one_line_that_names_it(flags: str) -> None:
    message = refusal(flags)
    assert REFUSED[flags] in message
    assert "\n" not in message


ON_ENGINE = "--bf16 --use-distributed-optimizer --transformer-impl transformer_engine --fp8-format hybrid"
EIGHT_BITS_REFUSED = {
    "--transformer-impl local": "give --transformer-impl transformer_engine",
    "--hidden-size 40": "multiples of 16, and --hidden-size gives a rank 40",
    "--moe-ffn-hidden-size 24": "--moe-ffn-hidden-size gives a rank 24",
    "--seq-length 12": "rows in multiples of 8",
    "--fp8-recipe mxfp8": "--fp8-recipe mxfp8 has no kernels for --device cpu",
    "--fp8-recipe blockwise": "--fp8-recipe blockwise has no kernels for --device cpu",
    "--first-last-layers-bf16": "cannot be combined with --fp8-recipe delayed",
    "--num-layers-at-end-in-bf16 2": "has an effect only with --first-last-layers-bf16",
    "--fp8-recipe tensorwise --fp8-amax-history-len 4": "--fp8-amax-history-len has an effect only with --fp8-recipe",
    "--fp8-recipe tensorwise --fp8-margin 1": "--fp8-margin has an effect only with --fp8-recipe delayed",
    "--fp8-amax-history-len 0": "--fp8-amax-history-len 0 must be at least 1",
}
CPU_WITH_ENGINE = Environment(world_size=4, cuda=False, transformer_engine=True, engine_on_cpu=True)


@pytest.mark.parametrize("flags", EIGHT_BITS_REFUSED)
def test_what_cannot_be_trained_in_eight_bits_is_refused_in_one_line(flags: str) -> None:
    message = refusal(f"{ON_ENGINE} {flags}", CPU_WITH_ENGINE)
    assert EIGHT_BITS_REFUSED[flags] in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--fp8-format e4m3 --transformer-impl transformer_engine", "needs --bf16"),
        ("--fp8-param-gather", "--fp8-param-gather has an effect only with --fp8-format"),
        ("--fp8-recipe tensorwise", "--fp8-recipe has an effect only with --fp8-format"),
        (f"{ON_ENGINE.replace('--use-distributed-optimizer', '')} --fp8-param-gather", "needs --use-distributed-opt"),
    ],
)
def test_flags_of_eight_bits_need_what_they_stand_on(flags: str, why: str) -> None:
    assert why in refusal(flags, CPU_WITH_ENGINE)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--multi-latent-attention", "--multi-latent-attention needs --transformer-impl transformer_engine"),
        ("--kv-lora-rank 16", "--kv-lora-rank needs --multi-latent-attention"),
        ("--rope-type yarn", "--rope-type needs --multi-latent-attention"),
        (
            "--multi-latent-attention --transformer-impl transformer_engine --position-embedding-type none",
            "needs --position-embedding-type rope, not none",
        ),
        (
            "--multi-latent-attention --transformer-impl transformer_engine --position-embedding-type rope "
            "--group-query-attention --num-query-groups 1",
            "--multi-latent-attention and --group-query-attention exclude each other",
        ),
        ("--hf-model somewhere", "--hf-model needs --export-hf-interval"),
    ],
)
def test_flags_of_latent_attention_and_of_exports_need_what_they_stand_on(flags: str, why: str) -> None:
    assert why in refusal(flags, CPU_WITH_ENGINE)


def test_weights_in_blocks_are_refused_on_gpus_too() -> None:
    on_gpus = Environment(world_size=4, cuda=True, transformer_engine=True)
    flags = f"--device cuda {ON_ENGINE} --fp8-recipe mxfp8"
    assert resolved(flags, on_gpus).fp8.fp8_recipe == "mxfp8"
    assert "keeps each weight twice" in refusal(f"{flags} --fp8-param-gather", on_gpus)


@pytest.mark.parametrize(
    "name", ["--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size", "--lr"]
)
def test_a_flag_that_has_no_default_is_asked_for_by_name(name: str) -> None:
    flags = GOOD.split()
    at = flags.index(name)
    with pytest.raises(InvalidInput, match=name):
        resolve(parse_config([*flags[:at], *flags[at + 2 :]]), FOUR_CPU_RANKS)


def test_the_same_flags_without_a_contradiction_are_taken() -> None:
    config = resolved("")
    assert config.training.global_batch_size == 8
    assert config.optimizer.lr_decay_iters == 10
    assert config.model.max_position_embeddings == 32
    assert config.flat.data_parallel_size == 2


def test_without_a_global_batch_size_each_rank_reads_one_microbatch() -> None:
    flags = GOOD.replace("--global-batch-size 8 ", "").split()
    assert resolve(parse_config(flags), FOUR_CPU_RANKS).training.global_batch_size == 2


@pytest.mark.parametrize(("text", "layers"), [("2", 2), ("([0]*1+[1]*3)", [0, 1, 1, 1]), ("[0,1]*2", [0, 1, 0, 1])])
def test_layer_patterns_are_read_without_running_them(text: str, layers: int | list[int]) -> None:
    from megatron.pretrain.config.derived import moe_layer_pattern

    assert moe_layer_pattern(text) == layers


def test_a_layer_pattern_is_never_run_as_code() -> None:
    assert "--moe-layer-freq" in refusal("--moe-layer-freq __import__('os').getpid()")


def test_later_flags_win() -> None:
    assert resolved("--lr 2e-3 --lr 3e-3").optimizer.lr == 3e-3


def test_partial_experts_need_experts() -> None:
    flags = GOOD.replace("--num-experts 4", "").replace("--expert-model-parallel-size 2", "").split()
    with pytest.raises(InvalidInput, match="pec needs --num-experts"):
        resolve(parse_config([*flags, "--moe-ckpt-strategy", "pec"]), FOUR_CPU_RANKS)


def test_only_experts_that_there_are_can_be_frozen() -> None:
    assert resolved("--freeze-experts").moe.freeze_experts
    flags = GOOD.replace("--num-experts 4", "").replace("--expert-model-parallel-size 2", "").split()
    with pytest.raises(InvalidInput, match="--freeze-experts needs --num-experts"):
        resolve(parse_config([*flags, "--freeze-experts"]), FOUR_CPU_RANKS)
    with pytest.raises(InvalidInput, match=r"--freeze-experts: --moe-layer-freq .* has no layer with experts"):
        resolved("--freeze-experts --moe-layer-freq [0]*4")


@pytest.mark.parametrize("window", ["auto", "1", "12"])
def test_sparse_takes_a_window_of_any_length_for_models_with_and_without_experts(window: str) -> None:
    assert resolved(f"--moe-ckpt-strategy sparse --moe-ckpt-window {window}").moe_checkpoint.window == window
    flags = GOOD.replace("--num-experts 4", "").replace("--expert-model-parallel-size 2", "").split()
    resolve(parse_config([*flags, "--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", window]), FOUR_CPU_RANKS)


ENGINE_ON_CPU = Environment(world_size=4, cuda=False, transformer_engine=True, engine_on_cpu=True)
ENGINE_ON_GPUS = Environment(world_size=4, cuda=True, transformer_engine=True)
GROUPED = "--transformer-impl transformer_engine --moe-grouped-gemm"


def test_transformer_engine_runs_on_the_cpu_where_it_was_loaded_for_it() -> None:
    assert resolved(GROUPED, ENGINE_ON_CPU).model.transformer_impl == "transformer_engine"
    assert resolved("", ENGINE_ON_CPU).model.transformer_impl == "local"
    assert "CUDA kernels" in refusal("", Environment(world_size=4, cuda=True, transformer_engine=True))
    assert "--device cuda" in refusal(f"--device cuda {GROUPED}", replace(ENGINE_ON_CPU, cuda=True))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """What Megatron-Core is given on GPUs with Transformer Engine for these flags."""
    monkeypatch.setattr(model, "TransformerConfig", SimpleNamespace)  # the real one asks for the packages

    def build(flags: str, *, biased: bool = False) -> SimpleNamespace:
        text = f"{GOOD} --device cuda {flags}".split()
        argv = [word for word in text if not (biased and word == "--disable-bias-linear")]
        return cast("SimpleNamespace", model.build_transformer_config(resolve(parse_config(argv), ENGINE_ON_GPUS)))

    return build


def test_dropout_is_fused_but_where_grouped_experts_have_biases(built: Callable[..., SimpleNamespace]) -> None:
    assert built(GROUPED).bias_dropout_fusion
    assert built(GROUPED, biased=True).add_bias_linear
    assert not built(GROUPED, biased=True).bias_dropout_fusion


def test_weight_gradients_of_megatron_s_own_layers_are_fused_only_with_apex(
    built: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    assert not built("").gradient_accumulation_fusion
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    assert built("").gradient_accumulation_fusion
    assert not built("--no-gradient-accumulation-fusion").gradient_accumulation_fusion


ONLY_GPUS = GOOD.replace("--device cpu ", "--distributed-backend gloo ")


def test_a_strategy_that_replays_needs_deterministic_kernels_on_gpus() -> None:
    def on_gpus(flags: str) -> PretrainConfig:
        return resolve(parse_config(f"{ONLY_GPUS} {flags}".split()), FOUR_GPUS)

    with pytest.raises(InvalidInput, match=r"give --deterministic-mode, or --moe-ckpt-replay-tolerance"):
        on_gpus("--moe-ckpt-strategy sparse")
    assert on_gpus("--moe-ckpt-strategy sparse --deterministic-mode").training.deterministic_mode
    on_gpus("--moe-ckpt-strategy sparse --moe-ckpt-replay-tolerance 1e-3")
    on_gpus("--moe-ckpt-strategy full")
    resolved("--moe-ckpt-strategy sparse")

"""Flags of optimization, schedules and the training loop."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.dist_checkpointing.moe.config import flag
from megatron.core.dist_checkpointing.moe.policy.expert_choice import SELECTIONS
from megatron.core.dist_checkpointing.moe.policy.partial import PEC_SCOPES


@dataclass(frozen=True)
class OptimizerFlags:
    """Optimizer, precision and schedules, with Megatron's names and defaults."""

    optimizer: str = flag("adam", "optimizer", choices=("adam",))
    lr: float | None = flag(None, "peak learning rate (required)", minimum=0)
    min_lr: float = flag(0.0, "lowest learning rate", minimum=0)
    lr_decay_style: str = flag(
        "linear", "decay of the learning rate", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = flag(None, "iterations of the decay (default: --train-iters)", minimum=1)
    lr_warmup_iters: int = flag(0, "iterations of linear warmup", minimum=0)
    lr_warmup_fraction: float | None = flag(None, "warmup as a share of --lr-decay-iters", minimum=0)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warmup", minimum=0)
    lr_wsd_decay_style: str = flag(
        "exponential", "decay at the end of WSD", choices=("exponential", "linear", "cosine")
    )
    lr_wsd_decay_iters: int | None = flag(None, "iterations of the decay at the end of WSD", minimum=1)
    weight_decay: float = flag(0.01, "weight decay", minimum=0)
    start_weight_decay: float | None = flag(
        None, "weight decay at the start, with --weight-decay-incr-style", minimum=0
    )
    end_weight_decay: float | None = flag(None, "weight decay at the end, with --weight-decay-incr-style", minimum=0)
    weight_decay_incr_style: str = flag(
        "constant", "schedule of the weight decay", choices=("constant", "linear", "cosine")
    )
    override_opt_param_scheduler: bool = flag(
        False, "schedules from the command line win over the checkpoint's", name="--override-opt_param-scheduler"
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "schedules from the checkpoint win over the command line", name="--use-checkpoint-opt_param-scheduler"
    )
    adam_beta1: float = flag(0.9, "first beta of Adam", minimum=0)
    adam_beta2: float = flag(0.999, "second beta of Adam", minimum=0)
    adam_eps: float = flag(1e-8, "epsilon of Adam", minimum=0)
    clip_grad: float = flag(1.0, "clip the global gradient norm to this; 0 turns clipping off", minimum=0)
    fp16: bool = flag(False, "train in fp16 with loss scaling")
    bf16: bool = flag(False, "train in bf16")
    loss_scale: float | None = flag(None, "static loss scale for fp16 (default: dynamic)", minimum=1)
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale", minimum=1)
    min_loss_scale: float = flag(1.0, "lowest dynamic loss scale", minimum=1)
    loss_scale_window: float = flag(1000, "iterations without overflow before the scale doubles", minimum=1)
    hysteresis: int = flag(2, "overflows before the scale halves", minimum=1)
    accumulate_allreduce_grads_in_fp32: bool = flag(False, "accumulate and reduce gradients in fp32 (bf16 implies it)")
    use_precision_aware_optimizer: bool = flag(
        False, "Transformer Engine's FusedAdam keeps masters and moments, in the dtypes of the flags below"
    )
    main_grads_dtype: str = flag(
        "fp32", "dtype of gradients, with --use-precision-aware-optimizer", choices=("fp32", "bf16")
    )
    main_params_dtype: str = flag(
        "fp32", "dtype of master weights, with --use-precision-aware-optimizer", choices=("fp32", "fp16")
    )
    exp_avg_dtype: str = flag("fp32", "dtype of first moments, likewise", choices=("fp32", "fp16", "bf16", "fp8"))
    exp_avg_sq_dtype: str = flag("fp32", "dtype of second moments, likewise", choices=("fp32", "fp16", "bf16", "fp8"))
    fp8_main_params: bool = flag(
        False, "master weights in fp8, as in FP8-LM, by a subclass of FusedAdam: no flag of Megatron's own"
    )
    gradient_accumulation_fusion: bool = flag(True, "no fused accumulation of weight gradients (CUDA with apex or TE)")


@dataclass(frozen=True)
class TrainingConfig:
    """Batches, length and end of training, evaluation, logs."""

    seq_length: int | None = flag(None, "tokens per sample (required)", minimum=1)
    micro_batch_size: int | None = flag(None, "samples per microbatch and data-parallel rank (required)", minimum=1)
    global_batch_size: int | None = flag(
        None, "samples per iteration (default: micro batch size x data-parallel size)", minimum=1
    )
    train_iters: int | None = flag(None, "iterations to train to (required)", minimum=0)
    seed: int = flag(1234, "seed of weights, dropout and data order")
    deterministic_mode: bool = flag(
        False,
        "only kernels that repeat themselves to the bit; sets what NCCL, cuBLAS and Transformer Engine need for it",
    )
    data_parallel_random_init: bool = flag(False, "different initial seeds on data-parallel ranks")
    calculate_per_token_loss: bool = flag(False, "scale the loss by non-padded tokens of the global batch")
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "train on when a loss is NaN", name="--no-check-for-nan-in-loss-and-grad"
    )
    eval_interval: int = flag(1000, "iterations between evaluations", minimum=1)
    eval_iters: int = flag(0, "iterations of each evaluation; 0 turns it off", minimum=0)
    exit_interval: int | None = flag(None, "save and exit at an iteration divisible by this", minimum=1)
    exit_duration_in_mins: float | None = flag(None, "save and exit after this many minutes", minimum=0)
    exit_signal_handler: bool = flag(False, "save and exit at the end of the iteration in which the signal arrives")
    exit_signal: str = flag(
        "SIGTERM", "signal of --exit-signal-handler", choices=("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
    )
    log_interval: int = flag(100, "iterations between log lines", minimum=1)
    log_progress: bool = flag(False, "append to progress.txt in --save: job starts, checkpoints, exits")
    tensorboard_dir: str | None = flag(None, "write TensorBoard scalars of the last rank here", metavar="DIR")
    metrics_jsonl: str | None = flag(None, "append one JSON object per iteration here", metavar="FILE")
    metrics_textfile: str | None = flag(
        None, "keep the newest numbers here for Prometheus' node_exporter", metavar="FILE"
    )
    metrics_port: int | None = flag(
        None, "serve the newest numbers for Prometheus on this port of localhost", metavar="PORT", minimum=0
    )
    wandb_project: str | None = flag(None, "write the numbers of the last rank to this project of Weights & Biases")
    wandb_exp_name: str | None = flag(None, "name of the run there (default: one that it makes)")
    wandb_save_dir: str | None = flag(None, "where Weights & Biases keeps its files", metavar="DIR")


@dataclass(frozen=True)
class DataConfig:
    """Corpus, tokenizer and loading."""

    data_path: tuple[str, ...] = flag((), "prefix of .bin/.idx, or several, or weight prefix weight prefix ...")
    train_data_path: tuple[str, ...] = flag((), "corpus of the training split, instead of --data-path")
    valid_data_path: tuple[str, ...] = flag((), "corpus of the validation split, instead of --data-path")
    test_data_path: tuple[str, ...] = flag((), "corpus of the test split, instead of --data-path")
    mock_data: bool = flag(False, "synthetic data of Megatron-Core")
    split: str = flag("969,30,1", "shares of training, validation and test in --data-path")
    data_cache_path: str | None = flag(None, "where dataset indices are cached", metavar="DIR")
    num_workers: int = flag(2, "data loading processes per rank; 0 loads in the trainer", minimum=0)
    tokenizer_type: str = flag(
        "ByteTokenizer", "tokenizer", choices=("ByteTokenizer", "HuggingFaceTokenizer", "NullTokenizer")
    )
    tokenizer_model: str | None = flag(None, "tokenizer.json of a HuggingFaceTokenizer, or its folder", metavar="FILE")
    vocab_size: int | None = flag(None, "vocabulary of a NullTokenizer", minimum=1)
    reset_position_ids: bool = flag(False, "restart positions after each end of document")
    reset_attention_mask: bool = flag(False, "no attention across ends of documents")
    eod_mask_loss: bool = flag(False, "no loss on ends of documents")
    mmap_bin_files: bool = flag(True, "read .bin files instead of mapping them")


@dataclass(frozen=True)
class CheckpointConfig:
    """Dense checkpoints, with Megatron's names and semantics."""

    save: str | None = flag(None, "where checkpoints are written", metavar="DIR")
    save_interval: int | None = flag(None, "iterations between checkpoints", minimum=1)
    save_optim: bool = flag(True, "leave the optimizer out of checkpoints")
    save_rng: bool = flag(True, "leave random number states out of checkpoints")
    load: str | None = flag(None, "where to resume from", metavar="DIR")
    ckpt_step: int | None = flag(None, "iteration to load instead of the newest", minimum=0)
    load_optim: bool = flag(True, "do not load the optimizer")
    load_rng: bool = flag(True, "do not load random number states")
    finetune: bool = flag(False, "load weights only and start at iteration 0")
    exit_on_missing_checkpoint: bool = flag(False, "fail instead of starting fresh when --load has no checkpoint")
    ckpt_format: str = flag("torch_dist", "format of checkpoints", choices=("torch_dist",))
    async_save: bool = flag(False, "write checkpoints in the background")
    ckpt_fully_parallel_save: bool = flag(True, "one data-parallel rank writes each shard")
    ckpt_fully_parallel_load: bool = flag(False, "data-parallel ranks share the reading")
    dist_ckpt_optim_fully_reshardable: bool = flag(
        False, "optimizer state that loads under any layout (default: same TP and PP only)"
    )
    save_experts: int | None = flag(
        None,
        "experts per MoE layer in each checkpoint; the others stay in older ones (default: all)",
        metavar="K",
        minimum=1,
    )
    save_experts_selection: str = flag(
        "sequential",
        "with --save-experts: experts in turn, or those with the most tokens since they were last saved",
        choices=SELECTIONS,
    )
    save_experts_scope: str = flag(
        "both",
        "with --save-experts: what is left out of the other experts: their weights, of all precisions; the moments of "
        "the optimizer; or both",
        choices=tuple(PEC_SCOPES),
    )
    export_hf_interval: int | None = flag(
        None, "iterations between exports of the weights for Hugging Face; of those that are saved", minimum=1
    )
    export_hf: str | None = flag(None, "where exports are written, with --export-hf-interval", metavar="DIR")
    hf_model: str | None = flag(
        None,
        "folder with the config and tokenizer that exports carry along (default: made from the flags)",
        metavar="DIR",
    )
    keep_last: int | None = flag(
        None, "checkpoints to keep in --save; older ones are removed (default: all)", metavar="N", minimum=1
    )

"""Contradictions in a command line, each with the values in it and what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.core.dist_checkpointing.moe.config import out_of_range
from megatron.core.dist_checkpointing.moe.contradictions import contradictions, must_repeat_itself
from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError
from megatron.core.dist_checkpointing.moe.policy.elastic import ElasticRange, unfit
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.config.derived import (
    Environment,
    data_parallel_size,
    moe_layer_pattern,
    virtual_pipeline_size,
)
from megatron.pretrain.config.fp8 import fp8
from megatron.pretrain.config.low_precision import precision_aware
from megatron.pretrain.config.model import ModelConfig


def required(config: PretrainConfig, _: Environment) -> Iterator[str]:
    needed = {
        "--num-layers": config.model.num_layers,
        "--hidden-size": config.model.hidden_size,
        "--num-attention-heads": config.model.num_attention_heads,
        "--seq-length": config.training.seq_length,
        "--micro-batch-size": config.training.micro_batch_size,
        "--train-iters": config.training.train_iters,
        "--lr": config.optimizer.lr,
    }
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        yield f"missing {', '.join(missing)}; see --help"
    for group in config.groups():
        if group is not config.moe_checkpoint:
            yield from out_of_range(group, prefix=getattr(group, "PREFIX", ""))
    if config.optimizer.lr == 0:
        yield "--lr 0 trains nothing"
    data, sources = config.data, 0
    sources += bool(data.data_path) + data.mock_data + bool(data.train_data_path)
    if sources != 1:
        yield "give exactly one of --data-path, --train-data-path and --mock-data"
    if (data.valid_data_path or data.test_data_path) and not data.train_data_path:
        yield "--valid-data-path and --test-data-path need --train-data-path"
    if data.vocab_size is not None and data.tokenizer_type != "NullTokenizer":
        yield f"--vocab-size is for a NullTokenizer; a {data.tokenizer_type} knows its own"


def devices(config: PretrainConfig, environment: Environment) -> Iterator[str]:
    layout, model, moe = config.parallel, config.model, config.moe
    if layout.device == "cuda" and not environment.cuda:
        yield "no CUDA device on this machine; pass --device cpu to train without one"
    with_engine = environment.has_engine_for(layout.device)
    kernels = {"transformer-engine": environment.transformer_engine and not with_engine, "apex": environment.apex}
    for name, installed in kernels.items():
        if layout.device == "cpu" and installed:
            yield f"{name} is installed and Megatron-Core would run its CUDA kernels; --device cpu needs a venv without"
    if layout.device == "cpu" and layout.distributed_backend == "nccl":
        yield "--distributed-backend nccl cannot serve --device cpu; leave it out or use gloo"
    default = "transformer_engine" if layout.device == "cuda" else "local"
    on_engine = with_engine and (model.transformer_impl or default) == "transformer_engine"
    if model.transformer_impl == "transformer_engine" and not on_engine:
        yield "--transformer-impl transformer_engine needs --device cuda and the package transformer-engine[pytorch]"
    if moe.moe_use_legacy_grouped_gemm:
        yield (
            "--moe-use-legacy-grouped-gemm: the legacy GroupedMLP keeps all experts in one tensor, so single experts "
            "cannot be checkpointed; use --moe-grouped-gemm with Transformer Engine, or neither flag"
        )
    if moe.moe_grouped_gemm and not on_engine:
        yield (
            "--moe-grouped-gemm needs Transformer Engine on --device cuda, or --transformer-impl transformer_engine on"
            " --device cpu; leave it out for sequential experts"
        )
    if layout.context_parallel_size > 1 and not on_engine:
        yield (
            f"--context-parallel-size {layout.context_parallel_size} needs Transformer Engine on --device cuda: "
            "Megatron-Core's own attention has no context parallelism"
        )
    cuda_only = {
        "--moe-token-dispatcher-type flex": moe.moe_token_dispatcher_type == "flex",
        "--moe-permute-fusion": moe.moe_permute_fusion,
        "--moe-shared-expert-overlap": moe.moe_shared_expert_overlap,
    }
    for name, given in cuda_only.items():
        if given and layout.device == "cpu":
            yield f"{name} needs --device cuda"


def layout(config: PretrainConfig, environment: Environment) -> Iterator[str]:
    layout, moe, world = config.parallel, config.moe, environment.world_size
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    cp, ep = layout.context_parallel_size, layout.expert_model_parallel_size
    etp = layout.expert_tensor_parallel_size or tp
    if world < 1:
        yield f"a job needs at least one rank, not {world}"
    if world % (tp * pp * cp):
        yield f"{world} ranks do not divide by TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp}; start a multiple"
    if moe.num_experts is None:
        if ep > 1:
            yield f"--expert-model-parallel-size {ep} needs --num-experts"
        return
    if moe.num_experts < 1 or moe.num_experts % ep:
        yield f"--num-experts {moe.num_experts} does not divide by --expert-model-parallel-size {ep}"
    if world % (etp * ep * pp):
        yield f"{world} ranks do not divide by ETP {etp} x EP {ep} x PP {pp} = {etp * ep * pp}; start a multiple"
    if tp > 1 and not layout.sequence_parallel:
        yield f"experts with --tensor-model-parallel-size {tp} need --sequence-parallel"


def batches(config: PretrainConfig, environment: Environment) -> Iterator[str]:
    training, layout = config.training, config.parallel
    assert training.micro_batch_size and training.global_batch_size and training.seq_length
    ranks = data_parallel_size(config, environment)
    step = training.micro_batch_size * ranks
    if training.global_batch_size % step:
        yield (
            f"--global-batch-size {training.global_batch_size} does not divide by --micro-batch-size "
            f"{training.micro_batch_size} x {ranks} data-parallel ranks = {step}"
        )
    microbatches = training.global_batch_size // step
    if virtual_pipeline_size(config) and microbatches % layout.pipeline_model_parallel_size:
        yield (
            f"the interleaved schedule needs microbatches in multiples of PP {layout.pipeline_model_parallel_size}, "
            f"but --global-batch-size {training.global_batch_size} gives {microbatches}"
        )
    parts = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
    parts *= 2 * layout.context_parallel_size if layout.context_parallel_size > 1 else 1
    if training.seq_length % parts:
        yield f"--seq-length {training.seq_length} does not divide by {parts}, as sequence or context parallelism needs"
    positions = config.model.max_position_embeddings or 0
    if positions < training.seq_length:
        yield f"--max-position-embeddings {positions} is below --seq-length {training.seq_length}"


def model(config: PretrainConfig, _: Environment) -> Iterator[str]:
    model, layout = config.model, config.parallel
    heads, layers, hidden = model.num_attention_heads or 0, model.num_layers or 0, model.hidden_size or 0
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    if model.kv_channels is None and hidden % heads:
        yield f"--hidden-size {hidden} does not divide by --num-attention-heads {heads}; or give --kv-channels"
    if model.swiglu and model.squared_relu:
        yield "--swiglu and --squared-relu exclude each other"
    if heads % tp:
        yield f"--num-attention-heads {heads} does not divide by --tensor-model-parallel-size {tp}"
    if model.group_query_attention != (model.num_query_groups is not None):
        yield "--group-query-attention and --num-query-groups go together"
    if model.num_query_groups and (heads % model.num_query_groups or model.num_query_groups % tp):
        yield f"--num-query-groups {model.num_query_groups} must divide {heads} heads and be a multiple of TP {tp}"
    if layout.num_virtual_stages_per_pipeline_rank and layout.num_layers_per_virtual_pipeline_stage:
        yield "give --num-virtual-stages-per-pipeline-rank or --num-layers-per-virtual-pipeline-stage, not both"
    if layers % pp == 0 and layers // pp % (layout.num_layers_per_virtual_pipeline_stage or 1):
        yield (
            f"--num-layers-per-virtual-pipeline-stage {layout.num_layers_per_virtual_pipeline_stage} does not divide "
            f"the {layers // pp} layers of a pipeline rank"
        )
    chunks = virtual_pipeline_size(config)
    if chunks is not None and pp < 2:
        yield "virtual pipeline stages need --pipeline-model-parallel-size of at least 2"
    if chunks == 0 or layers % (pp * (chunks or 1)):
        yield f"--num-layers {layers} does not divide by PP {pp} x {chunks} model chunks"
    yield from _latent_attention(model)
    if model.recompute_granularity == "full" and model.recompute_method is None:
        yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers"


_LATENT = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
    *("rotary_scaling_factor", "original_max_position_embeddings", "mscale", "mscale_all_dim"),
)


def _latent_attention(model: ModelConfig) -> Iterator[str]:
    if not model.multi_latent_attention:
        defaults = ModelConfig()
        for name in _LATENT:
            if getattr(model, name) != getattr(defaults, name):
                yield f"--{name.replace('_', '-')} needs --multi-latent-attention"
        return
    if model.transformer_impl != "transformer_engine":
        yield (
            "--multi-latent-attention needs --transformer-impl transformer_engine: Megatron-Core's own attention has"
            " one size for the heads of queries, keys and values"
        )
    if model.group_query_attention:
        yield "--multi-latent-attention and --group-query-attention exclude each other"
    if model.position_embedding_type != "rope":
        yield f"--multi-latent-attention needs --position-embedding-type rope, not {model.position_embedding_type}"


def experts(config: PretrainConfig, _: Environment) -> Iterator[str]:
    moe = config.moe
    if moe.num_experts is None:
        if moe.freeze_experts:
            yield "--freeze-experts needs --num-experts: a dense model has no experts to freeze"
        return
    if config.model.add_bias_linear and not moe.moe_grouped_gemm:
        yield "--num-experts needs --disable-bias-linear: Megatron-Core's sequential experts cannot train with a bias"
    kinds, coefficients = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    pattern = moe_layer_pattern(moe.moe_layer_freq)
    if isinstance(pattern, list) and len(pattern) != config.model.num_layers:
        yield f"--moe-layer-freq {moe.moe_layer_freq} has {len(pattern)} layers, --num-layers {config.model.num_layers}"
    if moe.freeze_experts and isinstance(pattern, list) and not any(pattern):
        yield f"--freeze-experts: --moe-layer-freq {moe.moe_layer_freq} has no layer with experts"
    if moe.moe_router_topk > moe.num_experts:
        yield f"--moe-router-topk {moe.moe_router_topk} must be between 1 and --num-experts {moe.num_experts}"
    if len(kinds) > 1 and ({"sinkhorn", "none"} & set(kinds) or len(set(kinds)) != len(kinds)):
        yield f"--moe-router-load-balancing-type {' '.join(kinds)}: only different auxiliary losses can be combined"
    if len(kinds) != len(coefficients):
        yield f"{len(kinds)} load balancing types need as many --moe-aux-loss-coeff, not {len(coefficients)}"
    if kinds in (("sinkhorn",), ("none",)) and any(coefficients):
        yield f"--moe-aux-loss-coeff has no meaning with --moe-router-load-balancing-type {kinds[0]}"
    if moe.moe_pad_expert_input_to_capacity and moe.moe_expert_capacity_factor is None:
        yield "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor"
    if moe.moe_router_enable_expert_bias and moe.moe_router_score_function != "sigmoid":
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid"


def precision(config: PretrainConfig, _: Environment) -> Iterator[str]:
    optimizer, layout = config.optimizer, config.parallel
    if optimizer.fp16 and optimizer.bf16:
        yield "--fp16 and --bf16 exclude each other"
    if optimizer.loss_scale is not None and not optimizer.fp16:
        yield "--loss-scale has an effect only with --fp16"
    if layout.overlap_param_gather and not (layout.use_distributed_optimizer and layout.overlap_grad_reduce):
        yield "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce"
    yield from precision_aware(config)


def schedule(config: PretrainConfig, _: Environment) -> Iterator[str]:
    optimizer = config.optimizer
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    decay_iters = optimizer.lr_decay_iters or 0
    if optimizer.lr_warmup_fraction is not None and config.flat.lr_warmup_iters:
        yield "give --lr-warmup-iters or --lr-warmup-fraction, not both"
    if optimizer.lr_warmup_iters and optimizer.lr_warmup_iters >= decay_iters:
        yield f"the warmup of {optimizer.lr_warmup_iters} iterations must be shorter than the decay of {decay_iters}"
    if (optimizer.lr or 0) < optimizer.min_lr:
        yield f"--lr {optimizer.lr} is below --min-lr {optimizer.min_lr}"
    if optimizer.weight_decay_incr_style == "constant" and (start is not None or end is not None):
        yield "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine"
    if optimizer.weight_decay_incr_style != "constant" and (start is None or end is None):
        yield f"--weight-decay-incr-style {optimizer.weight_decay_incr_style} needs --start- and --end-weight-decay"
    if optimizer.lr_decay_style == "WSD" and optimizer.lr_wsd_decay_iters is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters"
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        yield "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other"


def checkpoints(config: PretrainConfig, _: Environment) -> Iterator[str]:
    checkpoint, training = config.checkpoint, config.training
    needs_save = {
        "--save-interval": checkpoint.save_interval is not None,
        "--async-save": checkpoint.async_save,
        "--keep-last": checkpoint.keep_last is not None,
        "--save-experts": checkpoint.save_experts is not None,
        "--log-progress": training.log_progress,
    }
    for name, given in needs_save.items():
        if given and checkpoint.save is None:
            yield f"{name} needs --save"
    needs_load = {
        "--ckpt-step": checkpoint.ckpt_step is not None,
        "--finetune": checkpoint.finetune,
        "--no-load-optim": not checkpoint.load_optim,
        "--no-load-rng": not checkpoint.load_rng,
        "--exit-on-missing-checkpoint": checkpoint.exit_on_missing_checkpoint,
    }
    for name, given in needs_load.items():
        if given and checkpoint.load is None:
            yield f"{name} needs --load"
    if checkpoint.save_experts is not None:
        yield from _partial_saves(config, checkpoint.save_experts)
    else:
        for name, value in (("selection", checkpoint.save_experts_selection), ("scope", checkpoint.save_experts_scope)):
            if value not in ("sequential", "both"):
                yield f"--save-experts-{name} {value} needs --save-experts"
    yield from _exports(config)


def _exports(config: PretrainConfig) -> Iterator[str]:
    flags = config.checkpoint
    every, interval = flags.export_hf_interval, flags.save_interval
    if every is None:
        if flags.export_hf is not None or flags.hf_model is not None:
            yield f"{'--hf-model' if flags.export_hf is None else '--export-hf'} needs --export-hf-interval"
        return
    if flags.export_hf is None:
        yield "--export-hf-interval needs --export-hf"
    if interval is None or every % interval:
        yield f"--export-hf-interval {every} must be a multiple of --save-interval, which is {interval}"
    if flags.save_experts is not None:
        yield "--export-hf-interval and --save-experts exclude each other: an export needs all experts"
    from megatron.pretrain.checkpoint.hf_export import model_folder
    from moe_ckpt.hugging_face.exporting import check_arguments

    arguments = dataclasses.asdict(config.model) | dataclasses.asdict(config.moe)
    arguments["moe_layer_freq"] = moe_layer_pattern(config.moe.moe_layer_freq)
    try:
        check_arguments(arguments, model_folder(flags))
    except MoECheckpointError as error:
        yield f"--export-hf-interval: {error}"


def _partial_saves(config: PretrainConfig, save_experts: int) -> Iterator[str]:
    checkpoint, num_experts = config.checkpoint, config.moe.num_experts
    pattern = moe_layer_pattern(config.moe.moe_layer_freq)
    if num_experts is None:
        yield f"--save-experts {save_experts} needs --num-experts"
    elif isinstance(pattern, list) and not any(pattern):
        yield f"--save-experts {save_experts}: --moe-layer-freq {config.moe.moe_layer_freq} has no layer with experts"
    elif save_experts > num_experts:
        yield f"--save-experts {save_experts} must be at most --num-experts {num_experts}"
    in_buckets = config.parallel.use_distributed_optimizer and not checkpoint.dist_ckpt_optim_fully_reshardable
    if in_buckets and checkpoint.save_optim:
        yield (
            f"--save-experts {save_experts}: the distributed optimizer is saved in buckets that many parameters share, "
            "from which no expert can be left out; add --dist-ckpt-optim-fully-reshardable"
        )
    if checkpoint.save_experts_scope == "optimizer" and not checkpoint.save_optim:
        yield "--save-experts-scope optimizer and --no-save-optim exclude each other: nothing would be left out"


def protection(config: PretrainConfig, environment: Environment) -> Iterator[str]:
    yield from contradictions(
        config.moe_checkpoint,
        world_size=environment.world_size,
        num_experts=config.moe.num_experts or 0,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        stages=config.parallel.pipeline_model_parallel_size,
        signs_saves=bool(config.checkpoint.save or config.checkpoint.load),
    )


def elasticity(config: PretrainConfig, environment: Environment) -> Iterator[str]:
    layout, training, elastic = config.parallel, config.training, config.moe_checkpoint.elastic
    if elastic is None:
        return
    pp, tp = layout.pipeline_model_parallel_size, layout.tensor_model_parallel_size
    experts = (layout.expert_tensor_parallel_size or tp) * layout.expert_model_parallel_size
    yield from unfit(
        ElasticRange.parse(elastic),
        world_size=environment.world_size,
        replica_ranks=tp * pp * layout.context_parallel_size,
        node_ranks=environment.node_ranks,
        expert_ranks=experts * pp if config.moe.num_experts is not None else 1,
        global_batch=training.global_batch_size or 0,
        micro_batch=training.micro_batch_size or 1,
    )


def determinism(config: PretrainConfig, _: Environment) -> Iterator[str]:
    exact = must_repeat_itself(config.moe_checkpoint) and not config.training.deterministic_mode
    if exact and config.parallel.device == "cuda":
        yield (
            f"--moe-ckpt-strategy {config.moe_checkpoint.strategy} runs iterations again after a fault and compares"
            " them to the bit: give --deterministic-mode, or --moe-ckpt-replay-tolerance for how much losses may differ"
        )


BEFORE_DEFAULTS = (required, devices, layout)
AFTER_DEFAULTS = (batches, model, experts, precision, fp8, schedule, checkpoints, protection, elasticity, determinism)

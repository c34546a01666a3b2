"""What follows from the flags and the machine: sizes and layouts that several modules need."""

from __future__ import annotations

import ast
import dataclasses

from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.errors import InvalidInput


@dataclasses.dataclass(frozen=True)
class Environment:
    """What the machine offers: number of ranks in the job, a CUDA device, packages with kernels that can be imported.

    node_ranks: Ranks of each node; 1 where that is not known.
    engine_on_cpu: Whether the kernels of Transformer Engine are those of `te_on_cpu`.
    """

    world_size: int
    cuda: bool
    transformer_engine: bool
    apex: bool = False
    engine_on_cpu: bool = False
    node_ranks: int = 1

    def has_engine_for(self, device: str) -> bool:
        """Whether Transformer Engine can run on `device`."""
        return self.transformer_engine and self.engine_on_cpu == (device == "cpu")


def data_parallel_size(config: PretrainConfig, environment: Environment) -> int:
    """Ranks that hold the same shard of the non-expert weights: world / (TP x PP x CP)."""
    layout = config.parallel
    model_ranks = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    return environment.world_size // model_ranks


def moe_layer_pattern(text: str) -> int | list[int]:
    """`--moe-layer-freq`: an integer N (every N-th layer), or a list of 0 and 1 built with `+` and `*`."""
    try:
        value = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise InvalidInput(f"--moe-layer-freq {text!r} is neither a number nor a list such as ([0]*1+[1]*3)") from error
    if isinstance(value, list) and set(value) <= {0, 1}:
        return value
    if isinstance(value, int) and value > 0:
        return value
    raise InvalidInput(f"--moe-layer-freq {text!r} must be a positive number or a list of 0 and 1")


def _evaluated(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluated(item) for item in node.elts]
        return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return left * right
    raise ValueError("not a layer pattern")


def virtual_pipeline_size(config: PretrainConfig) -> int | None:
    """Model chunks per pipeline rank, or None without interleaving."""
    layout, layers = config.parallel, config.model.num_layers or 0
    if layout.num_virtual_stages_per_pipeline_rank:
        return layout.num_virtual_stages_per_pipeline_rank
    if layout.num_layers_per_virtual_pipeline_stage:
        return layers // layout.pipeline_model_parallel_size // layout.num_layers_per_virtual_pipeline_stage
    return None

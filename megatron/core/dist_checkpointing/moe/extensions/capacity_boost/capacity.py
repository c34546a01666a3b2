"""More capacity for experts that lost tokens, in room that others leave unused (MOETION 6).

Core's routers drop what is beyond one capacity of all experts, in `apply_router_token_dropping`, which
`transformer/moe/router.py` calls by that name. There is no seam for a capacity of each expert, so while tokens are
owed that name stands for a function here (checked against core 0.17.1 and 0.19.2), which has core's own result where
the layer owes nothing. A hook on each router says whose tokens are routed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from megatron.core.transformer.moe import router as routing
from megatron.core.transformer.moe.moe_utils import get_capacity
from megatron.core.transformer.moe.router import TopKRouter

from ...core_versions.training import before_passes_are_repeated, captures_routers
from ...errors import UsageError
from ...megatron_state.module_tree import layers_of_routers
from ...megatron_state.popularity import arriving_counts
from ...types import OperatorId, expert
from ..lossy.selection import capacity_boost

Routed = tuple[torch.Tensor, torch.Tensor]
"""Probabilities and choice of experts, each [tokens, experts]."""


class RouterCapacity:
    """Lets experts of this rank's routers exceed their capacity by `percent` while they owe tokens.

    Only in training: an evaluation drops as ever. The sum of capacities of a layer stays as it is in each pass, so what
    a boosted expert takes is what others leave unused. Each rank and microbatch grants by itself up to what is owed in
    all, so that an iteration may make up for more than that, but never beyond `percent`.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], percent: int) -> None:
        self._percent = percent
        self._layers = layers_of_routers(chunks)
        if any(captures_routers(router.config) for router in self._layers):
            raise UsageError("a captured router keeps its capacity: use --moe-ckpt-capacity-boost 0")
        self._owed: dict[int, dict[OperatorId, int]] = {}
        self._beyond: dict[int, torch.Tensor] = {}
        self._layer: int | None = None
        self._patched = ExitStack()

    def owe(self, owed: Mapping[OperatorId, int]) -> None:
        """From the next pass on, these experts of all layers owe so many tokens."""
        self._owed = {}
        for operator, tokens in owed.items():
            self._owed.setdefault(operator.layer, {})[operator] = tokens
        if owed and not self._beyond:
            self._patch()
        elif not owed:
            self.close()

    def take(self) -> Callable[[], Mapping[int, tuple[int, ...]]]:
        """Tokens by layer and expert that were processed beyond the capacity on this rank, since the last call."""
        if not self._beyond:
            return dict
        layers = sorted(self._beyond)
        taken = arriving_counts(layers, torch.stack([self._beyond[layer] for layer in layers]))
        self.begin()
        return taken

    def begin(self) -> None:
        """Passes of an iteration begin, perhaps once more: what those before took is of the same tokens."""
        for count in self._beyond.values():
            count.zero_()

    def close(self) -> None:
        """Leave routers as they were."""
        self._patched.close()
        self._beyond, self._layer = {}, None

    def _patch(self) -> None:
        self._patched.enter_context(before_passes_are_repeated(self.begin))
        for router, layer in self._layers.items():
            zeros = torch.zeros(router.config.num_moe_experts, dtype=torch.int64, device=router.weight.device)
            self._beyond[layer] = zeros
            self._patched.callback(router.register_forward_pre_hook(self._enter).remove)
        upstream = routing.apply_router_token_dropping
        self._patched.callback(setattr, routing, "apply_router_token_dropping", upstream)

        def dropped(probabilities: torch.Tensor, chosen: torch.Tensor, *arguments: Any, **options: Any) -> Routed:
            owed = self._owed.get(self._layer, {}) if self._layer is not None else {}
            if not owed:
                found: Routed = upstream(probabilities, chosen, *arguments, **options)
                return found
            return self._dropped(probabilities, chosen, owed, *arguments, **options)

        routing.apply_router_token_dropping = dropped

    def _enter(self, router: TopKRouter, _: object) -> None:
        # Both passes of recomputed activations have to drop alike; an evaluation is told by the mode.
        self._layer = self._layers[router] if router.training else None

    def _dropped(
        self,
        probabilities: torch.Tensor,
        chosen: torch.Tensor,
        owed: Mapping[OperatorId, int],
        router_topk: int,
        capacity_factor: float,
        drop_policy: str = "probs",
        **_: object,
    ) -> Routed:
        """As core's `apply_router_token_dropping` without padding, with a capacity of each expert."""
        num_tokens, num_experts = probabilities.shape
        base = get_capacity(num_tokens * router_topk, num_experts, capacity_factor)
        layer = next(iter(owed)).layer
        # Waits for the device, while tokens are owed.
        routed = {expert(layer, index): count for index, count in enumerate(chosen.sum(dim=0).tolist())}
        boosted = capacity_boost(owed, dict.fromkeys(routed, base), routed, self._percent).capacity
        capacity = torch.tensor([boosted[one] for one in sorted(boosted)], device=probabilities.device)
        by = probabilities if drop_policy == "probs" else chosen.int()
        most = min(num_tokens, int(capacity.max()))
        _, order = torch.topk(by, k=most, dim=0, sorted=True)
        within = torch.arange(most, device=probabilities.device)[:, None] < capacity[None, :]
        kept = torch.zeros_like(chosen, dtype=torch.bool).scatter(0, order, within)
        final = torch.logical_and(chosen, kept)
        if torch.is_grad_enabled():  # not the first pass of recomputed activations
            self._beyond[layer] += (final.sum(dim=0) - base).clamp(min=0)
        return probabilities * final, final

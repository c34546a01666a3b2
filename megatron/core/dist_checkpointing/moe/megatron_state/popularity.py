"""How many tokens the routers of this rank send to each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.moe.router import TopKRouter

from ..core_versions.training import before_passes_are_repeated
from ..device import Arriving
from ..errors import UsageError
from .module_tree import layers_of_routers

_SCORES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}
"""How core's routers score experts, before it makes the scores add up to 1 (checked: core 0.17.1, 0.19.2)."""


def arriving_counts(layers: Sequence[int], counts: torch.Tensor) -> Callable[[], Mapping[int, tuple[int, ...]]]:
    """What gives the rows of a tensor by layer, from any thread; it waits for them.

    Args:
        layers: Of each row.
        counts: May be changed after that.
    """
    taken = Arriving(counts)
    return lambda: {layer: tuple(row) for layer, row in zip(layers, taken.wait().tolist(), strict=True)}


class TokenCounter:
    """Counts tokens by the forward passes of this rank's routers, on the device, until `take`.

    A token counts once for each expert that it was routed to and not dropped; padding does not count. In a layer that
    runs for several depths (`--mtp-use-repeated-layer`) it counts as the mean over these, rounded up. Only passes that
    will be followed by a backward pass count: neither evaluation nor the first of the two passes of recomputed
    activations. Where routers run in CUDA graphs hooks are called at the capture only; the sums that they add are
    captured, and each replay adds its own to the same tensors.

    Args:
        chunks: The model chunks of this rank.
        gate_unit: If given, each token counts for each expert of its layer, routed there or not, as many times as its
            gating probability has this unit, rounded (MoEvement App. B, Soft-Count). The probabilities are those of the
            router's score function over all experts. Core gives only those of the chosen ones away, so that they are
            taken from what `TopKRouter.routing` is called with (checked: core 0.17.1, 0.19.2).
        iteration: Gives the current one where counts are taken after several: only its own are dropped when its passes
            begin once more. None: they are taken in each.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        *,
        gate_unit: float | None = None,
        iteration: Callable[[], int] | None = None,
    ) -> None:
        self._layers = layers_of_routers(chunks)
        self._counts: dict[int, torch.Tensor] = {}
        self._runs: dict[int, int] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._iteration, self._counted = iteration, 0
        self._hooks = ExitStack()
        for router in self._layers:
            scores = router.config.moe_router_score_function
            if gate_unit is None:
                self._hooks.callback(router.register_forward_hook(self._count).remove)
            elif scores not in _SCORES:
                raise UsageError(f"soft-count does not know the gates of routers with {scores}; use another ordering")
            else:
                self._hooks.enter_context(self._counting_gates(router, gate_unit))
            zeros = torch.zeros(router.config.num_moe_experts, dtype=torch.int64, device=router.weight.device)
            self._counts[self._layers[router]] = zeros
            if iteration is not None:
                self._before[self._layers[router]] = zeros.clone()
            self._runs[self._layers[router]] = _runs(router)
        self._hooks.enter_context(before_passes_are_repeated(self.begin))

    def begin(self) -> None:
        """Passes of an iteration begin, perhaps once more: what those before counted is of the same tokens."""
        for count in self._counts.values():
            count.zero_()

    def take(self) -> Callable[[], Mapping[int, tuple[int, ...]]]:
        """Tokens by expert for each MoE layer on this rank, counted from layer 0, since the last call.

        The sum over all ranks counts each token of a batch once for each of its experts: ranks of one tensor-parallel
        group route different parts of the sequence, and ranks that do not have a layer do not list it.

        Returns:
            What gives them, from any thread: it waits for the device, which this call does not.
        """
        if not self._counts:
            return dict
        layers = sorted(self._counts)
        # One transfer from the device, not one for each layer.
        taken = arriving_counts(layers, torch.stack([self._once(layer) for layer in layers]))
        for count in (*self._counts.values(), *self._before.values()):
            count.zero_()
        return taken

    def close(self) -> None:
        """Count no longer."""
        self._hooks.close()

    def _once(self, layer: int) -> torch.Tensor:
        count, runs = self._counts[layer], self._runs[layer]
        if self._before:
            count = count + self._before[layer]
        return count if runs == 1 else (count + runs - 1) // runs

    def _of(self, router: TopKRouter) -> torch.Tensor:
        """Counts of the current iteration."""
        if self._iteration is not None and (now := self._iteration()) != self._counted:
            self._counted = now
            for layer, count in self._counts.items():
                self._before[layer] += count
            self.begin()
        return self._counts[self._layers[router]]

    def _count(self, router: TopKRouter, _: object, routed: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not _counts():
            return
        probabilities, chosen = routed
        if router.config.moe_pad_expert_input_to_capacity:
            chosen = chosen & (probabilities > 0)  # core fills each expert up with tokens that were not routed to it
        count = self._of(router)
        count += chosen.sum(dim=0, dtype=torch.int64)

    @contextmanager
    def _counting_gates(self, router: TopKRouter, unit: float) -> Iterator[None]:
        upstream = router.routing

        def routing(logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if _counts():
                # Whole numbers: their sum does not depend on the order, so all ranks and replays come to the same one.
                # Of an overflow, whose step is skipped, some gates are no number.
                units = (_gates(router, logits.detach()) / unit).nan_to_num(0.0).round().long()
                count = self._of(router)
                count += units.sum(dim=0)
            return upstream(logits, *arguments, **options)

        router.routing = routing
        try:
            yield
        finally:
            del router.routing


def _runs(router: TopKRouter) -> int:
    """How often a router sees each token."""
    repeated = getattr(router, "is_mtp_layer", False) and getattr(router.config, "mtp_use_repeated_layer", False)
    return router.config.mtp_num_layers if repeated else 1


def _counts() -> bool:
    """Whether a pass is of training: no evaluation, nor the first pass of recomputed activations, nor one that runs
    before modules are captured, over inputs that are no tokens."""
    is_warm_up = is_graph_capturing() and not torch.cuda.is_current_stream_capturing()
    return torch.is_grad_enabled() and not is_warm_up


def _gates(router: TopKRouter, logits: torch.Tensor) -> torch.Tensor:
    """Probabilities of all experts for each token, [tokens, experts], which add up to 1, in double precision."""
    scores = logits.reshape(-1, logits.shape[-1]).double()
    gates = _SCORES[router.config.moe_router_score_function](scores)
    return gates / gates.sum(dim=-1, keepdim=True)

"""How many tokens the routers of this rank send to each expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megatron.core.transformer.moe.router import TopKRouter


class ArrivingCounts:
    """Counts on their way to the host."""

    def __init__(self, layers: Sequence[int], counts: torch.Tensor) -> None:
        self._layers, self._counts, self._arrived = layers, counts, None
        if counts.is_cuda:
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def __call__(self) -> Mapping[int, tuple[int, ...]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return {layer: tuple(row) for layer, row in zip(self._layers, self._counts.tolist(), strict=True)}


class TokenCounter:
    """Counts tokens by the forward passes of this rank's routers, on the device, until `take`.

    A token counts once for each expert that it was routed to and not dropped. Only passes that will be followed by a
    backward pass count: neither evaluation nor the first of the two passes of recomputed activations.

    Args:
        chunks: The model chunks of this rank.
        gate_unit: If given, a token counts as many times as its gating probability has this unit, rounded.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], *, gate_unit: float | None = None) -> None:
        self._gate_unit = gate_unit
        routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        self._counts: dict[int, torch.Tensor] = {}
        self._hooks = [router.register_forward_hook(self._count) for router in routers]
        for router in routers:
            zeros = torch.zeros(router.config.num_moe_experts, dtype=torch.int64, device=router.weight.device)
            self._counts[router.layer_number - 1] = zeros

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
        taken = ArrivingCounts(layers, torch.stack([self._counts[layer] for layer in layers]))
        for count in self._counts.values():
            count.zero_()
        return taken

    def close(self) -> None:
        """Count no longer."""
        for hook in self._hooks:
            hook.remove()

    def _count(self, router: TopKRouter, _: object, routed: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not torch.is_grad_enabled():  # an evaluation, or the first pass of recomputed activations
            return
        probabilities, chosen = routed
        weights = chosen
        if self._gate_unit is not None:
            # Whole numbers: their sum does not depend on the order, so all ranks and replays come to the same one.
            weights = (probabilities.detach().double() / self._gate_unit).round().long() * chosen
        self._counts[router.layer_number - 1] += weights.sum(dim=0, dtype=torch.int64)

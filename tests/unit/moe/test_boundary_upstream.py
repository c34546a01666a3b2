"""What logs of stage boundaries, and replays of some stages, rely on in Megatron-Core is what was read.

Where this fails, read what has changed, see whether `local_recovery/communicator.py` and `replay/patches.py` still
hold, run `tests/process/test_stage_replay.py`, and only then take over the new digest.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from operator import attrgetter

import pytest

from megatron.core.dist_checkpointing.moe.local_recovery.communicator import BoundaryCommunicator
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

READ = {
    "pipeline_parallel.p2p_communication": {
        "P2PCommunicator": "0bff5e498f55",
        "_p2p_ops": "20995746a481",
        "_batched_p2p_ops": "4b0901807501",
    },
    "pipeline_parallel.schedules": {
        "forward_backward_pipelining_without_interleaving": "ecf7d69308cd",
        "forward_backward_pipelining_with_interleaving": "bd10736079d7",
        "forward_step_calc_loss": "0b552e0742e6",
        "backward_step": "6ac4aa596b1b",
    },
    "distributed.finalize_model_grads": {
        "finalize_model_grads": "8e8e2bb919cc",
        "_allreduce_word_embedding_grads": "e08f696038b3",
        "_update_router_expert_bias": "5525682ddf01",
    },
    "distributed.distributed_data_parallel": {
        "DistributedDataParallel.scale_gradients": "60c297a8b042",
    },
    "optimizer.optimizer": {
        "ChainedOptimizer.step": "7f8c72f2d721",
        "ChainedOptimizer.count_zeros": "981953542340",
        "MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan": "0cb7a5fb6d0d",
    },
    "transformer.moe.moe_utils": {
        "get_updated_expert_bias": "a639d016fd9f",
        "reduce_aux_losses_tracker_across_ranks": "6210401abaeb",
    },
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in READ.items() for name in names])
def test_upstream_is_what_was_read(module: str, name: str) -> None:
    source = inspect.getsource(attrgetter(name)(importlib.import_module(f"megatron.core.{module}")))
    assert hashlib.sha256(source.encode()).hexdigest()[:12] == READ[module][name]


def test_all_communication_passes_through_the_method_that_is_replaced() -> None:
    ours, theirs = (inspect.signature(one._communicate).parameters for one in (BoundaryCommunicator, P2PCommunicator))
    assert list(ours) == list(theirs)
    assert [one.default for one in ours.values()] == [one.default for one in theirs.values()]
    calls = [name for name, method in vars(P2PCommunicator).items() if name.startswith(("send_", "recv_"))]
    assert len(calls) == 9
    for name in calls:
        source = inspect.getsource(getattr(P2PCommunicator, name))
        assert "self._communicate(" in source
        assert "torch.distributed" not in source

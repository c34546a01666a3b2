"""What logs of stage boundaries, and replays of some stages, rely on in Megatron-Core is what was read of each release.

Where this fails, read what has changed, see whether `local_recovery/communicator.py` and `replay/patches.py` still
hold, run `tests/process/test_stage_replay.py`, and only then take over the new digest.
A row has one digest for each release of `upstream.RELEASES`.
"""

from __future__ import annotations

import inspect

import pytest
from upstream import digest_of, read_in_installed

from megatron.core.dist_checkpointing.moe.local_recovery.communicator import BoundaryCommunicator
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

READ = {
    "pipeline_parallel.p2p_communication": {
        "P2PCommunicator": "7301a12dceb9 = =",
        "_p2p_ops": "20995746a481 = =",
        "_batched_p2p_ops": "4b0901807501 = =",
    },
    "pipeline_parallel.schedules": {
        "forward_backward_pipelining_without_interleaving": "79bb2ba211d5 c8fd558b6fdc 772d6b7d8182",
        "forward_backward_pipelining_with_interleaving": "45dd6edc2bf8 450e85c2b521 091263d1c27e",
        "forward_step_calc_loss": "d972e4b02f52 24757f83c3de 9990d300271b",
        "backward_step": "435628e2479e = =",
    },
    "distributed.finalize_model_grads": {
        "finalize_model_grads": "8e8e2bb919cc 1ea6af88d1ec 36d18a1e1730",
        "_allreduce_word_embedding_grads": "e08f696038b3 = =",
        "_update_router_expert_bias": "d1a4c2ca391f 8e40129e34fc 4f72a525f62b",
    },
    "distributed.distributed_data_parallel": {
        "DistributedDataParallel.scale_gradients": "60c297a8b042 = =",
    },
    "optimizer.optimizer": {
        "ChainedOptimizer.step": "7f8c72f2d721 75c16d153784 c2b301e02ec2",
        "ChainedOptimizer.count_zeros": "981953542340 86884da2dc51 0ffb395e3315",
        "MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan": "0cb7a5fb6d0d = =",
    },
    "transformer.moe.moe_utils": {
        "get_updated_expert_bias": "a639d016fd9f e45f226e2f0e =",
        "reduce_aux_losses_tracker_across_ranks": "6210401abaeb 5d63756b496c =",
    },
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in READ.items() for name in names])
def test_upstream_is_what_was_read(module: str, name: str) -> None:
    assert digest_of(module, name) == read_in_installed(READ[module][name])


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

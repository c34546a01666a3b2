"""With how many replicas a job may continue, and what has to fit for that."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions.elastic.sizes import ElasticRange, inelastic

JOB = {"world_size": 8, "replica_ranks": 2, "node_ranks": 2, "expert_ranks": 4, "global_batch": 48, "micro_batch": 1}


def problems(text: str, **changes: Any) -> list[str]:
    return list(inelastic(MoECheckpointConfig(strategy="full", elastic=text), **(JOB | changes)))


@pytest.mark.parametrize("text", ["", "2", "0:2", "3:2", "1:2:3", "a:b", "-1:2", " 1:2"])
def test_what_is_no_range_of_replicas_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="MIN:MAX"):
        ElasticRange.parse(text)


def test_only_sizes_that_whole_nodes_make_have_to_fit() -> None:
    assert ElasticRange.parse("1:4").sizes(replica_ranks=2, node_ranks=4) == (2, 4)
    assert not problems("2:4", node_ranks=4)


def test_nodes_of_one_replica_have_to_join_and_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    spanning = {"world_size": 16, "replica_ranks": 8, "node_ranks": 4}
    (line,) = problems("1:2", **spanning)
    assert "a replica spans 2 nodes" in line and "--moe-ckpt-unit-nodes 2" in line
    for nodes, fits in (("4", True), ("2", True), ("3", False), ("1", False)):
        monkeypatch.setenv("MOE_CKPT_UNIT_NODES", nodes)
        assert (problems("1:2", **spanning) == []) is fits, nodes


def test_experts_have_to_fit_into_the_smallest_world() -> None:
    (line,) = problems("1:4", global_batch=24, expert_ranks=4, node_ranks=2, replica_ranks=2)[:1]
    assert "1 replicas have 2 ranks, which do not divide by ETP x EP x PP = 4" in line


def test_the_global_batch_has_to_divide_under_every_size() -> None:
    (line,) = problems("2:4", global_batch=16, expert_ranks=2)
    assert "--global-batch-size 16 does not divide by --micro-batch-size 1 x 3 replicas" in line


def test_a_job_of_another_size_is_refused() -> None:
    (line,) = problems("2:3", expert_ranks=2)
    assert "8 ranks make 4 data-parallel replicas" in line

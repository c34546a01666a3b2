"""torch's elastic agent, which waits only briefly for other nodes once its ranks have said that no restart helps."""

from __future__ import annotations

import logging
from datetime import timedelta

from torch.distributed import DistError, Store
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.utils.store import barrier

from megatron.pretrain.processes import has_verdict

log = logging.getLogger(__name__)

OTHERS_S = 10
"""How long the ranks of other nodes may take to come to the same verdict."""


class VerdictAgent(LocalElasticAgent):
    """Torch's, but where ranks left a verdict it ends after `OTHERS_S`, not after 300 s.

    The rank that leaves first may take along what others still meet at. They fail then and come back to the
    rendezvous, which is closed only when this agent ends: until then each would wait for the other.
    """

    def _exit_barrier(self) -> None:
        if has_verdict():
            wait_for_others(self._store, self._worker_group.group_world_size)
        else:
            super()._exit_barrier()


def wait_for_others(store: Store, nodes: int, timeout_s: float = OTHERS_S) -> None:
    """Wait until the agents of all nodes are here, or for some time.

    Args:
        store: The store of the rendezvous.
        nodes: The number of nodes.
        timeout_s: The longest time in seconds.
    """
    store.set_timeout(timedelta(seconds=timeout_s))
    try:
        barrier(store, nodes, "moe-ckpt/verdict", timeout_s)
    except DistError:
        log.warning("ranks exited with a permanent error; other nodes are still running after %g s", timeout_s)

"""Values of all ranks through the store that they found each other in, before there are connections between them."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, Store

from ..ports import PeerLost

if TYPE_CHECKING:
    from ..ports import Json

_READ_S = 5.0
"""How long rank 0 waits for the others to read what all have said: it may keep the store, and be about to end."""


def gathered_by_store(store: Store, name: str, rank: int, world_size: int, value: Json, timeout_s: float) -> list[Json]:
    """The values of all ranks, in their order; a collective, for which each rank asks the store only a few times.

    name: the same on all ranks, and used once. Raises PeerLost naming the ranks that did not come in time.
    """
    place, patience = PrefixStore(name, store), timedelta(seconds=timeout_s)
    place.set(str(rank), json.dumps(value))
    if rank:
        try:
            place.wait(["all"], patience)
        except RuntimeError:
            raise PeerLost(f"rank {rank} waited {timeout_s:g} s for rank 0 to say that all have started") from None
        found: list[Json] = json.loads(place.get("all"))
        if place.add("read", 1) == world_size - 1:
            place.set("all read", "")
        return found
    keys = [str(other) for other in range(world_size)]
    try:
        place.wait(keys, patience)
    except RuntimeError:
        missing = [key for key in keys if not place.check([key])]
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise PeerLost(f"rank 0 waited {timeout_s:g} s for {ranks}, which did not start") from None
    values: list[Json] = [json.loads(place.get(key)) for key in keys]
    place.set("all", json.dumps(values))
    if world_size > 1:
        with suppress(RuntimeError):  # whoever has not read it by now has ended
            place.wait(["all read"], timedelta(seconds=min(timeout_s, _READ_S)))
    return values

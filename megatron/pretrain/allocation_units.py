"""Which waiting nodes get a place in a job: whole allocation units, and nodes with copies in memory first.

An allocation unit is what a scheduler hands out and a failure takes along as one: a rack, an NVLink domain.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

UNIT = "MOE_CKPT_UNIT"
"""Environment variable with the label of the node's unit, which launchers hand on to ranks."""
UNIT_NODES = "MOE_CKPT_UNIT_NODES"
"""Environment variable in which a launcher hands the nodes of a whole unit to its rendezvous."""
SLURM = "slurm"
"""In place of a label: what Slurm's topology says."""
_SLURM_ADDRESS = "SLURM_TOPOLOGY_ADDR"
_LABEL = re.compile(r"[\w.:/,\[\]-]{1,128}")


@dataclass(frozen=True)
class Candidate:
    """A node that wants a place.

    Attributes:
        node: Its key.
        unit: Its label; empty: it has none.
        trained: The last round of the rendezvous in which a node of this name had a place; -1: none.
        has_joined: Whether it has one in this round, which it keeps.
    """

    node: Hashable
    unit: str
    trained: int = -1
    has_joined: bool = False


def whole_units(line: Sequence[Candidate], places: int, unit_nodes: int) -> list[Candidate]:
    """Those that get a place as parts of whole units, units in the order of preference.

    Units that have begun to join are first, then the ones that trained last, then the ones that came first. A unit
    with more nodes than it takes gives the first of them in that order.

    Args:
        line: All that are alive, in the order in which they came.
        places: Of the job.
        unit_nodes: Nodes of a whole unit; 1: each node is one.
    """
    units: dict[Hashable, list[Candidate]] = {}
    for one in line:
        units.setdefault((one.unit if unit_nodes > 1 else one.node), []).append(one)
    whole = [sorted(unit, key=_preference)[:unit_nodes] for unit in units.values() if len(unit) >= unit_nodes]
    chosen = [one for unit in sorted(whole, key=lambda unit: min(map(_preference, unit))) for one in unit]
    others = sum(one.has_joined for one in line) - sum(one.has_joined for one in chosen)
    room = max(0, places - others)
    return chosen[: room - room % unit_nodes]


def admitted(line: Sequence[Candidate], places: int, least: int, unit_nodes: int, *, is_late: bool) -> set[Hashable]:
    """The nodes that get a place.

    Parts of units fill what whole units leave only where these are fewer than the job needs: as soon as the nodes that
    wait fill all places once a job has trained, and at its first start where it `is_late`, since more may come.

    Args:
        line: All that are alive, in the order in which they came.
        places: Of the job, at most.
        least: Nodes without which it cannot train.
        unit_nodes: Nodes of a whole unit.
        is_late: Whether nodes have waited for whole units long enough.
    """
    chosen = {one.node for one in whole_units(line, places, unit_nodes)}
    chosen |= {one.node for one in line if one.has_joined}
    has_trained = any(one.trained >= 0 for one in line)
    if len(chosen) < least and (is_late or (has_trained and len(line) >= places)):
        parts = [one.node for one in sorted(line, key=_preference) if one.node not in chosen]
        chosen |= set(parts[: places - len(chosen)])
    return chosen


def _preference(one: Candidate) -> tuple[bool, int]:
    """Copies in memory are worth a place: the sort is stable, so what came first is first among equals."""
    return not one.has_joined, -one.trained


def add_unit_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of allocation units."""
    group = parser.add_argument_group("allocation units")
    group.add_argument(
        "--moe-ckpt-unit", default=os.environ.get(UNIT, ""), metavar="LABEL",
        help="rack or NVLink domain of this node: replicas are placed in other ones; slurm: as SLURM_TOPOLOGY_ADDR"
        f" says (default: ${UNIT})",
    )  # fmt: skip
    group.add_argument(
        "--moe-ckpt-unit-nodes", type=int, default=1, metavar="N",
        help="nodes of a whole unit: a unit that loses a node is replaced as a whole where a whole one waits (default:"
        " 1, nodes are replaced one by one)",
    )  # fmt: skip


def export_unit(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Hand the flags of allocation units on to the rendezvous and the ranks. Ends the process for what cannot work.

    Args:
        parser: Which says so.
        options: These flags, and those of torchrun.
    """
    label, nodes = options.moe_ckpt_unit, options.moe_ckpt_unit_nodes
    most = options.nnodes.rpartition(":")[2]
    if label == SLURM:
        # The last part is the node, those before it the switches or the block above it.
        label = os.environ.get(_SLURM_ADDRESS, "").rpartition(".")[0]
        if not label:
            parser.error(
                f"--moe-ckpt-unit slurm: Slurm gives no ${_SLURM_ADDRESS} with switches or blocks; give a label"
            )
    if label and not _LABEL.fullmatch(label):
        parser.error(f"--moe-ckpt-unit {label!r}: give letters, digits and .:/,[]_- up to 128 characters")
    if nodes != 1:
        if nodes < 1 or not most.isdecimal() or int(most) % nodes:
            parser.error(f"--moe-ckpt-unit-nodes {nodes}: --nnodes {options.nnodes} is not a multiple of it")
        if not label:
            parser.error(f"--moe-ckpt-unit-nodes {nodes}: give --moe-ckpt-unit LABEL, on each node its own")
        if options.rdzv_backend != "c10d":
            parser.error(f"--moe-ckpt-unit-nodes {nodes}: give --rdzv-backend c10d, others do not keep units whole")
    os.environ[UNIT], os.environ[UNIT_NODES] = label, str(nodes)

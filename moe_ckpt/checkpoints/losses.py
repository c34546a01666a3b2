"""What faults have cost a job whose strategy may lose tokens, as its snapshots remember it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from megatron.core.dist_checkpointing.moe.policy.ledger import LossRecord, TokenLedger
from megatron.core.dist_checkpointing.moe.policy.lossy_recovery import mlt, plt_moc, plt_pec
from moe_ckpt.report import Fact, Table, table

from .survey import Holding

_SHARES = {"PLT MoC": plt_moc, "PLT PEC": plt_pec, "MLT": mlt}
"""MoC eq. 7, PEC eq. 4, MOETION eq. 6."""

_COLUMNS = "fault after:count | went on from:count | lost tokens:count | PLT MoC:share | PLT PEC:share | MLT:share"


@dataclass(frozen=True)
class Losses:
    """The faults of one timeline, oldest first. tokens: of the planned training; topk: of each token; 0: unknown."""

    records: tuple[LossRecord, ...]
    tokens: int
    topk: int

    @classmethod
    def newest(cls, holdings: Iterable[Holding]) -> Losses | None:
        """Of the newest snapshot that has them; None where no strategy counted tokens."""
        for held in sorted(holdings, key=lambda one: (-one.snapshot.iteration, one.snapshot.rank)):
            remembered = cast("Mapping[str, Any]", held.stored.facts.scalars.get("strategy") or {})
            if remembered.get("ledger"):
                tokens, topk = remembered.get("planned", (0, 0))
                return cls(TokenLedger.from_data(remembered["ledger"]).losses, tokens, topk)
        return None

    def facts(self) -> tuple[Fact, ...]:
        """What all faults have cost, by the definitions of the papers."""
        lost = self._sums(len(self.records))
        return (
            Fact("Lost tokens of all faults", sum(lost), "count"),
            *(Fact(name, share, "share") for name, share in zip(_SHARES, self._shares(lost), strict=True)),
        )

    def table(self) -> Table:
        """A row for each fault; shares are those of all faults up to it."""
        rows = (
            (one.fault_iteration, one.restored_iteration, sum(one.lost_tokens), *self._shares(self._sums(at + 1)))
            for at, one in enumerate(self.records)
        )
        return table("Lost tokens", _COLUMNS, rows)

    def _sums(self, faults: int) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(one.lost_tokens for one in self.records[:faults]), strict=True)))

    def _shares(self, lost: tuple[int, ...]) -> tuple[float | None, ...]:
        if not self.tokens:
            return (None,) * len(_SHARES)
        return tuple(float(share(lost or (0,), self.tokens, self.topk)) for share in _SHARES.values())

"""Tables and figures of the papers, recomputed: `PAPERS` lists them, `result` computes one."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from .result import PaperResult


@dataclass(frozen=True)
class Paper:
    """One table or figure. `module`, a file beside this one, has `result() -> PaperResult`; `what` is a sentence."""

    module: str
    what: str


PAPERS = {
    "table3": Paper("table3", "MoEvement Table 3: intervals, overhead, recovery and ETTR of four systems and models."),
    "table6": Paper("table6", "MoEvement Table 6: host memory of Gemini and MoEvement."),
    "table7": Paper("table7", "MoEvement Table 7: the same as Table 3 in low precision, on H100 GPUs."),
    "fig1": Paper("fig1", "MoEvement Fig. 1: Gemini's overhead, recovery and ETTR by checkpoint interval."),
    "fig10": Paper("fig10", "MoEvement Fig. 10: goodput under a 6-hour failure trace."),
    "fig11": Paper("fig11", "MoEvement Fig. 11: ETTR of models up to 671B parameters on up to 16,384 GPUs."),
    "fig13": Paper("fig13", "MoEvement Fig. 13: what each of MoEvement's techniques contributes."),
    "fig16": Paper("fig16", "MoEvement Fig. 16: ETTR by the skewness of expert popularity."),
    "moc-fig10": Paper("moc_fig10", "MoC-System Fig. 10: checkpoint size by experts saved and by sharding."),
    "moc-fig13": Paper("moc_fig13", "MoC-System Fig. 13: overheads at scale."),
    "moetion-fig9": Paper("moetion_fig9", "MOETION Fig. 9: sizes and times by number of experts."),
}


def result(name: str) -> PaperResult:
    """Compute the table or figure of that name. Raises KeyError for one that is not in `PAPERS`."""
    found: PaperResult = import_module(f".{PAPERS[name].module}", __name__).result()
    return found

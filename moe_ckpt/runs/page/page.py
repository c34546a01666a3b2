"""The whole page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..accounts import Run
from . import sections, stops
from .charts import BUCKETS, Curve, chart
from .html import duration, escape, share, short, table
from .style import STYLE

SECTIONS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("Loss", sections.loss),
    ("Stalls and overhead", sections.overhead),
    ("Protection", sections.protection),
    ("Time", sections.time_spent),
    ("Faults and recoveries", stops.stops),
    ("Lost tokens", stops.lost_tokens),
    ("Memory and bytes", sections.memory),
    ("Window and order", sections.windows),
)

WATCH = """
<script>(()=>{let open=()=>[...document.querySelectorAll('details')].map(d=>d.open);setInterval(async()=>{try{
let answer=await fetch(location.href,{cache:'no-store'});if(!answer.ok)return;
let next=new DOMParser().parseFromString(await answer.text(),'text/html').querySelector('main'),was=open();
document.querySelector('main').replaceWith(next);
document.querySelectorAll('details').forEach((d,at)=>{if(at<was.length)d.open=was[at]});}catch(e){}},%d)})()</script>
<noscript><meta http-equiv="refresh" content="%d"></noscript>"""


def render(runs: Sequence[Run], made_s: float, watch_s: float | None = None) -> str:
    """The page as HTML of its own. made_s: when, in seconds since 1970. watch_s: it renews itself so often."""
    title = "Run report: " + ", ".join(run.name for run in runs)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(made_s))
    several = len(runs) > 1
    body = _comparison(runs) if several else ""
    for at, run in enumerate(runs):
        body += _run(run, at, several=several)
    live = WATCH % (1000 * watch_s, max(1, round(watch_s))) if watch_s is not None else ""
    thin = max(map(len, (run.kept for run in runs)), default=0) > 2 * BUCKETS
    note = (
        f" Curves of more than {2 * BUCKETS} points show the least and the greatest value of each of {BUCKETS} spans."
        if thin
        else ""
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head><body>'
        f'<main><h1>{escape(title)}</h1><p class="soft">{"Live, as of" if watch_s is not None else "Made"} {when} by'
        f" moe-ckpt report.{note}</p>{body}</main>{live}</body></html>\n"
    )


def _run(run: Run, at: int, *, several: bool) -> str:
    heading = f'<h2 id="run{at}">{escape(run.name)}</h2>' if several else ""
    level = "h3" if several else "h2"
    found = heading + sections.overview(run)
    for name, section in SECTIONS:
        content = section(run)
        if content:
            found += f'<section id="{_slug(name, at)}">' + f"<{level}>{name}</{level}>{content}</section>"
    return found


def _slug(name: str, at: int) -> str:
    """For links to a section: `protection`, and of further runs `protection-1`."""
    return name.lower().replace(" ", "-") + (f"-{at}" if at else "")


def _comparison(runs: Sequence[Run]) -> str:
    """All runs side by side."""
    links = "".join(f'<li><a href="#run{at}">{escape(run.name)}</a></li>' for at, run in enumerate(runs))
    rows = [
        ("newest iteration", *(f"{run.newest:,}" for run in runs)),
        ("strategy", *(str(run.facts.get("strategy", "-")) for run in runs)),
        ("time", *(duration(run.time.total_s) for run in runs)),
        ("ETTR so far", *(share(run.time.ettr) for run in runs)),
        (
            "ETTR by the drill",
            *("-" if run.drill is None or run.drill.ettr is None else share(run.drill.ettr) for run in runs),
        ),
        (
            "iterations protected",
            *(share(run.states["protection"]["protected"]) if "protection" in run.states else "-" for run in runs),
        ),
        ("waiting for checkpoints", *(_part(run, run.time.stall_s) for run in runs)),
        ("slowed by copies", *(_part(run, run.time.slowed_s) for run in runs)),
        ("run again", *(_part(run, run.time.again_s) for run in runs)),
        ("stopped by faults", *(_part(run, run.time.stopped_s) for run in runs)),
        ("stops", *(str(len(run.stops)) for run in runs)),
        ("lost tokens", *(f"{sum(sum(row.values()) for row in run.lost_tokens.values()):,}" for run in runs)),
        *(
            (title, *(_share_lost(run, name) for run in runs))
            for title, name in (("PLT (MoC eq. 7)", "plt"), ("PLT (PEC eq. 4)", "plt_pec"), ("MLT", "mlt"))
        ),
        ("tokens per second", *(short(run.last("tokens_per_s")).strip() for run in runs)),
        ("last loss", *(short(run.last("lm_loss")).strip() for run in runs)),
    ]
    losses = [Curve(run.name, sections.points(run, "lm_loss"), at % 8) for at, run in enumerate(runs)]
    return (
        f"<nav><ul>{links}</ul></nav><h2>Compared</h2>{table(('', *(run.name for run in runs)), rows)}"
        f"{chart('Loss of all runs', losses)}"
    )


def _share_lost(run: Run, name: str) -> str:
    """What all faults have cost by one definition."""
    shares = [getattr(recovery, name) for recovery in run.log.recoveries]
    known = [one for one in shares if one is not None]
    return f"{100 * known[-1]:.4f} %" if known else "-"


def _part(run: Run, length_s: float) -> str:
    total_s = run.time.total_s
    return f"{duration(length_s)} ({share(length_s / total_s)})" if total_s else "-"

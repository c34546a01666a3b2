"""The whole page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..accounts import Run
from . import sections, stops
from .charts import BUCKETS, Curve, chart
from .html import duration, escape, share, short, table

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

STYLE = (
    """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#57606a;--line:#d0d7de;--card:#f6f8fa;--mark:#b3261e;
--c0:#0b5cad;--c1:#b35900;--c2:#1a7f37;--c3:#8250df;--c4:#a40e63;--c5:#0e7490;--c6:#6b5900;--c7:#444c56;
--ok:#1a7f37;--warn:#c77700;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--soft:#9ea7b3;--line:#30363d;--card:#161b22;
--mark:#ff8177;--c0:#6cb6ff;--c1:#f0a35e;--c2:#57ab5a;--c3:#c297ff;--c4:#f778ba;--c5:#39c5cf;--c6:#daaa3f;--c7:#adbac7;
--ok:#46954a;--warn:#c69026;--bad:#e5534b}}
*{box-sizing:border-box;print-color-adjust:exact;-webkit-print-color-adjust:exact}
body{margin:0 auto;max-width:72rem;padding:1rem;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,sans-serif}h1{font-size:1.6rem}h2{font-size:1.25rem;margin-top:2.5rem;border-top:1px solid
var(--line);padding-top:1rem}h3{font-size:1.05rem}h1,h2,li{overflow-wrap:anywhere}small,.soft{color:var(--soft);font-size:.85rem}a{color:var(--c0)}
nav ul,.legend{list-style:none;padding:0;margin:.3rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
.say{padding:0;list-style:none}.say li{background:var(--card);border-left:.35rem solid var(--c7);padding:.5rem .8rem;
margin:.4rem 0}.say li.ok{border-color:var(--ok)}.say li.warn{border-color:var(--warn)}.say li.bad{border-color:
var(--bad)}.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.2rem,1fr));gap:.6rem;margin:1rem 0}
.figures div{background:var(--card);padding:.6rem .8rem;border-radius:.4rem}dt{color:var(--soft);font-size:.85rem}
dd{margin:0;font-size:1.3rem;font-weight:600}dd small{display:block;font-weight:400}
figure{margin:1.5rem 0}figcaption{font-weight:600}.plot{display:grid;grid-template-columns:5.5rem 1fr;margin-top:.7rem}
.plot svg{width:100%;height:13rem;overflow:visible;display:block}.y{position:relative}.y span{position:absolute;right:
.4rem;transform:translateY(-50%);font-size:.75rem;color:var(--soft)}.x{display:flex;justify-content:space-between;
margin-left:5.5rem;font-size:.75rem;color:var(--soft);padding-top:.3rem}.grid{stroke:var(--line);stroke-width:1}
path{fill:none;vector-effect:non-scaling-stroke}.line{stroke-width:1.8;stroke-linecap:round}.dots{stroke-width:7;stroke-linecap:round}
.mark{stroke:var(--mark);stroke-width:1.5;stroke-dasharray:4 3}
.band{display:grid;grid-template-columns:5.5rem 1fr;align-items:center;margin:.3rem 0;font-size:.85rem}
.band .mark{stroke:var(--fg)}.band svg{width:100%;height:1.4rem}
.level2{fill:var(--ok);background:var(--ok)}.level1{fill:var(--warn);background:var(--warn)}
.level0{fill:var(--bad);background:var(--bad)}
.legend li{font-size:.85rem;display:flex;align-items:center;gap:.35rem}.legend i{width:1rem;height:.25rem;
display:inline-block}.legend i.dot{height:.6rem;width:.6rem;border-radius:50%}.legend i.mark{height:1rem;width:0;
border-left:2px dashed var(--mark)}.legend i[class^=p],.legend i[class^=level]{height:.8rem;width:.8rem}
.bar{display:flex;height:1.8rem;border-radius:.3rem;overflow:hidden;margin:.5rem 0;background:var(--card)}
.bar i{border-right:1px solid var(--bg)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;margin:.6rem 0}caption{text-align:left;
font-weight:600;padding:.3rem 0}th,td{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:left;
font-weight:400;vertical-align:top}thead th{color:var(--soft)}.n{text-align:right;white-space:nowrap;
font-variant-numeric:tabular-nums}
@media (max-width:30rem){table{font-size:.8rem}th,td{padding:.25rem}}
@media print{figure,tr,.bar,.legend,.figures div,.say li{break-inside:avoid}h2,h3,figcaption,summary{break-after:avoid}
pre{white-space:pre-wrap}}
pre{background:var(--card);padding:.8rem;overflow-x:auto;font-size:.8rem}summary{cursor:pointer;padding:.2rem 0}
.heat td{min-width:2.6rem;text-align:right;font-size:.8rem}
"""
    + "".join(f".c{at}{{background:var(--c{at})}}.s{at}{{stroke:var(--c{at})}}" for at in range(8))
    + "".join(
        f".p{at}{{background:var(--{color})}}"
        for at, color in enumerate(("c2", "c0", "c1", "c3", "c5", "c4", "c6", "c7", "bad", "warn"))
    )
)
"""Light and dark, wide and narrow, and on paper. Colors of text have a contrast of at least 4.5 to 1."""

WATCH = """
<script>(()=>{let open=()=>[...document.querySelectorAll('details')].map(d=>d.open);setInterval(async()=>{try{
let answer=await fetch(location.href,{cache:'no-store'});if(!answer.ok)return;
let next=new DOMParser().parseFromString(await answer.text(),'text/html').querySelector('main'),was=open();
document.querySelector('main').replaceWith(next);
document.querySelectorAll('details').forEach((d,at)=>{if(at<was.length)d.open=was[at]});}catch(e){}},%d)})()</script>
<noscript><meta http-equiv="refresh" content="%d"></noscript>"""


def render(runs: Sequence[Run], made_s: float, watch_s: float | None = None) -> str:
    """The whole page as HTML that needs no other file.

    Args:
        runs: The runs to show, at least one.
        made_s: Time at which the page was made, in seconds since 1970.
        watch_s: Seconds after which the page renews itself; None: it does not.
    """
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
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head><body>'
        f'<main><h1>{escape(title)}</h1><p class="soft">{"Live, as of" if watch_s is not None else "Made"} {when} by'
        f" moe-ckpt report.{note}</p>{body}</main>{live}</body></html>\n"
    )
    return page.encode(errors="replace").decode()  # half a pair of surrogates, as JSON may have, is no text


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
        ("recomputed", *(_part(run, run.time.again_s) for run in runs)),
        ("stopped by faults", *(_part(run, run.time.stopped_s) for run in runs)),
        ("restarts", *(str(len(run.stops)) for run in runs)),
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

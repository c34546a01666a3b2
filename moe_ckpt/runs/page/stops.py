"""The parts of the page about faults: each recovery as a bar of its parts, and what was lost."""

from __future__ import annotations

from ..accounts import Run, Stop
from ..run_log import RecoveryRecord
from .charts import stacked
from .html import duration, escape, share, table

SHOWN = 60
OPEN = 8
MOST_EXPERTS = 4096
ENDS_WHEN = {
    "aborted": "a later fault ended the recovery",
    "detect": "the last survivor heard of the fault",
    "park": "survivors had put their state aside",
    "restart": "new processes began",
    "import": "they had done their imports",
    "rendezvous": "all were connected",
    "build": "model, optimizer and memory were there",
    "inventory": "all knew what each one holds",
    "plan": "it was decided who restores what",
    "fetch": "state was verified and restored",
    "replay": "the lost stages had caught up",
    "rejoin": "all stood at the same iteration",
}


def stops(run: Run) -> str:
    """One part for each, the newest ones if there are very many."""
    found = run.stops
    if not found:
        return "<p>None so far.</p>"
    more = f"<p>The newest {SHOWN} of {len(found)} are shown.</p>" if len(found) > SHOWN else ""
    shown = found[-SHOWN:]
    first = len(found) - len(shown) + 1
    return more + "".join(_stop(at, stop, is_open=len(shown) <= OPEN) for at, stop in enumerate(shown, start=first))


def _stop(at: int, stop: Stop, *, is_open: bool) -> str:
    what = f" ({stop.what})" if stop.what else ""
    title = f"<h3>{at}. After iteration {stop.after:,}{escape(what)}</h3>"
    recovery = stop.recovery
    if recovery is None:
        return f"{title}<p>Training continued behind iteration {stop.resumed:,}, from a checkpoint or again.</p>"
    bar = stacked([(name, length_s, duration(length_s)) for name, length_s in recovery.parts.items()], recovery.total_s)
    rows = [
        (
            name,
            duration(length_s),
            share(length_s / recovery.total_s if recovery.total_s else 0),
            ENDS_WHEN.get(name, ""),
        )
        for name, length_s in recovery.parts.items()
    ]
    details = table(("Part", "time", "share", "until"), rows)
    if recovery.table:
        lines = escape("\n".join(recovery.table))
        details += f"<p>What was restored from where:</p><pre>{lines}</pre>"
    opened = " open" if is_open else ""
    opener = f"<details{opened}><summary>Parts and sources</summary>"
    return f"{title}<p>{escape(_sentence(stop.after, recovery))}</p>{bar}{opener}{details}</details>"


def _sentence(after: int, recovery: RecoveryRecord) -> str:
    since = "detection" if recovery.is_whole else "the restart (no rank left word of the fault)"
    who = f"{recovery.ranks_back} of {recovery.ranks} ranks ran up to {recovery.replayed} iterations again"
    again = who if recovery.replayed else "no replay"
    lost = max(0, after - recovery.target)
    recomputed = f", {lost} iteration{'s' if lost > 1 else ''} recomputed" if lost else ""
    tries = f", in {recovery.attempts} attempts" if recovery.attempts > 1 else ""
    return (
        f"Recovered iteration {recovery.target:,} {recovery.exactness} in {duration(recovery.total_s)} from {since}"
        f"{tries}: {recovery.scope or 'unknown'} rollback, {again}{recomputed}."
    )


def lost_tokens(run: Run) -> str:
    """By layer and expert, darker where more were lost."""
    lost = run.lost_tokens
    if not lost:
        return ""
    most = max(tokens for experts in lost.values() for tokens in experts.values()) or 1
    experts = sorted({expert for row in lost.values() for expert in row})
    sums = [(f"layer {layer}", f"{sum(row.values()):,}") for layer, row in sorted(lost.items())]
    if len(experts) * len(lost) > MOST_EXPERTS:
        largest = sorted(
            ((tokens, layer, expert) for layer, row in lost.items() for expert, tokens in row.items()), reverse=True
        )
        rows = [(f"layer {layer}, expert {expert}", f"{tokens:,}") for tokens, layer, expert in largest[:50]]
        return table(("Lost tokens", ""), sums) + table(("The 50 experts that lost most", "tokens"), rows)
    head = "".join(f'<th scope="col" class="n">{expert}</th>' for expert in experts)
    body = "".join(
        f'<tr><th scope="row">{layer}</th>{"".join(_cell(row.get(expert, 0), most) for expert in experts)}'
        f'<td class="n">{sum(row.values()):,}</td></tr>'
        for layer, row in sorted(lost.items())
    )
    return (
        '<div class="scroll"><table class="heat"><caption>Routed tokens whose updates were lost, by layer (rows) and'
        f' expert (columns)</caption><thead><tr><th scope="col">layer</th>{head}<th scope="col" class="n">all</th></tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _cell(tokens: int, most: int) -> str:
    strength = round(45 * tokens / most)
    shade = f' style="background:color-mix(in srgb,var(--c1) {strength}%,transparent)"' if tokens else ""
    return f"<td{shade}>{tokens:,}</td>"

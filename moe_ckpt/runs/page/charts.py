"""Charts as inline SVG that stretches with the page, and labels beside it as text, so that a phone can show both.

A curve of more points than a screen has columns is cut into buckets, of each of which the least and the greatest value
are drawn: no outlier is lost, and the page stays small.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .html import escape

BUCKETS = 400
WIDTH, HEIGHT = 1000.0, 240.0
MOST_MARKS = 200
_HEIGHTS = (6, 13, 20)
"""Of a band, by its level: colors alone do not tell everybody."""


@dataclass(frozen=True)
class Curve:
    """points: ascending by x; y is NaN where nothing is known. color: the number of a color of the page's style. dots:
    each point for itself, else a line; steps: which keeps its height up to the next point."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int
    dots: bool = False
    steps: bool = False


@dataclass(frozen=True)
class Mark:
    """A vertical line."""

    at: float
    what: str


def chart(
    title: str, curves: Sequence[Curve], marks: Sequence[Mark] = (), *, unit: str = "", from_zero: bool = False
) -> str:
    """Curves over iterations as HTML; empty where no value is known, and broken where some are not. Units are scaled.

    Args:
        title: Title of the chart.
        curves: The curves, drawn in this order.
        marks: Vertical lines, of which `MOST_MARKS` are drawn.
        unit: Unit of the values, shown with the title.
        from_zero: Whether the axis of values includes 0.
    """
    shown = [(curve, list(thinned(curve.points))) for curve in curves]
    points = [point for _, some in shown for point in some]
    if not points:
        return ""
    unit, factor = _scaled(unit, max(abs(y) for _, y in points))
    shown = [(curve, [(x, factor * y) for x, y in some]) for curve, some in shown]
    points = [point for _, some in shown for point in some]
    # Unknown values take their place: charts below each other have the same iterations.
    places = [x for curve in curves for x, _ in curve.points]
    left, right = min(places), max(places)
    lowest, highest = min(y for _, y in points), max(y for _, y in points)
    bottom, top, ticks = scale(min(0.0, lowest) if from_zero else lowest, highest)
    frame = _Frame(left, right if right > left else left + 1, bottom, top)
    grid = "".join(f'<path class="grid" d="M0 {frame.y(tick):.1f}H{WIDTH:.0f}"/>' for tick in ticks)
    drawn = "".join(_drawn(curve, some, frame) for curve, some in shown if some)
    lines = "".join(_line(mark, frame) for mark in marks[:MOST_MARKS] if left <= mark.at <= right)
    heights = [(100 * frame.y(tick) / HEIGHT, _tick(tick)) for tick in ticks]
    scale_y = "".join(f'<span style="top:{at:.1f}%">{escape(text)}</span>' for at, text in heights)
    keys = [(f"c{curve.color}{' dot' if curve.dots else ''}", curve.name) for curve, some in shown if some]
    keys += [("mark", "fault or restart")] if lines else []
    named = f"{title} ({unit})" if unit else title
    summary = f"{named}, iterations {left:.0f} to {right:.0f}, from {_tick(lowest)} to {_tick(highest)}"
    return (
        f"<figure><figcaption>{escape(title)}{f' <small>{escape(unit)}</small>' if unit else ''}</figcaption>"
        f'{legend(keys)}<div class="plot"><div class="y" aria-hidden="true">{scale_y}</div>'
        f'<svg role="img" aria-label="{escape(summary)}" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
        f' preserveAspectRatio="none">{grid}{lines}{drawn}</svg></div>{_below(frame)}</figure>'
    )


def bands(
    title: str, rows: Sequence[tuple[str, Sequence[tuple[float, float]]]], levels: Sequence[str], marks: Sequence[Mark]
) -> str:
    """For each row, the level over iterations, as HTML; of a bucket the lowest level counts.

    Args:
        title: Title of the chart.
        rows: Name and points of each row; a point is (iteration, index in `levels`).
        levels: Names of the levels, lowest first.
        marks: Vertical lines, of which `MOST_MARKS` are drawn.
    """
    rows = [(name, points) for name, points in rows if points]
    if not rows:
        return ""
    left = min(points[0][0] for _, points in rows)
    right = max(points[-1][0] for _, points in rows)
    # As of `chart`, so that the same iteration is at the same place; the last one has the width of a line.
    frame = _Frame(left, right if right > left else left + 1, 0, 1)
    parts = []
    for name, points in rows:
        rects = "".join(
            _rect(
                level,
                frame.x(begin),
                frame.x(min(end, frame.right)),
                f"{levels[level]}, iterations {begin:.0f} to {end - 1:.0f}",
            )
            for begin, end, level in _spans(points)
        )
        lines = "".join(f'<path class="mark" d="M{frame.x(mark.at):.1f} 0V20"/>' for mark in marks[:MOST_MARKS])
        parts.append(
            f'<div class="band"><span>{escape(name)}</span><svg role="img" aria-label="{escape(name)}"'
            f' viewBox="0 0 {WIDTH:.0f} 20" preserveAspectRatio="none">{rects}{lines}</svg></div>'
        )
    keys = [(f"level{at}", name) for at, name in reversed([*enumerate(levels)])]
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{legend(keys)}{''.join(parts)}"
        f'<div class="banded">{_below(frame)}</div></figure>'
    )


def stacked(parts: Iterable[tuple[str, float, str]], total: float) -> str:
    """One bar as HTML, each part with a color of its own.

    Args:
        parts: Name, length, and the length in words of each part; parts without length are left out.
        total: Length of the whole bar, in the unit of the parts.
    """
    # Numbered with those that are left out: in the bars of several recoveries a part has the same color.
    found = [(f"p{at % 10}", name, length, text) for at, (name, length, text) in enumerate(parts) if length > 0]
    bar = "".join(
        f'<i class="{color}" style="width:{100 * length / total:.3f}%" title="{escape(name)}: {escape(text)}"></i>'
        for color, name, length, text in found
        if total > 0
    )
    keys = [(color, f"{name} {text}") for color, name, _, text in found]
    words = ", ".join(f"{name} {text}" for _, name, _, text in found)
    return f'<div class="bar" role="img" aria-label="{escape(words)}">{bar}</div>{legend(keys)}'


def legend(keys: Iterable[tuple[str, str]]) -> str:
    """What the colors mean."""
    found = "".join(f'<li><i class="{kind}"></i>{escape(name)}</li>' for kind, name in keys)
    return f'<ul class="legend">{found}</ul>'


def thinned(points: Sequence[tuple[float, float]], buckets: int = BUCKETS) -> Iterator[tuple[float, float]]:
    """Of each bucket of known points the lowest and the highest, in their order.

    Args:
        points: (x, y), ascending by x; y is NaN where nothing is known.
        buckets: Most buckets to divide the points into.
    """
    known = [point for point in points if not math.isnan(point[1])]
    size = -(-len(known) // buckets)
    if size <= 2:
        yield from known
        return
    for begin in range(0, len(known), size):
        some = known[begin : begin + size]
        low, high = min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])
        yield from sorted({low, high})


def scale(lowest: float, highest: float, count: int = 4) -> tuple[float, float, list[float]]:
    """Bottom, top and ticks of an axis.

    Args:
        lowest: Smallest value on the axis.
        highest: Largest value on the axis.
        count: About how many steps to divide the axis into.
    """
    if highest <= lowest:
        highest = lowest + (abs(lowest) or 1.0)
    rough = (highest - lowest) / count
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 1e-300 else 1e-300
    step = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= rough * 0.999)
    first, last = math.floor(lowest / step), math.ceil(highest / step)
    return first * step, last * step, [at * step for at in range(first, last + 1)]


@dataclass(frozen=True)
class _Frame:
    left: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        """In the picture."""
        return WIDTH * (value - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        """In the picture, downward."""
        return HEIGHT * (self.top - value) / (self.top - self.bottom)


def _drawn(curve: Curve, points: Sequence[tuple[float, float]], frame: _Frame) -> str:
    places = [(f"{frame.x(x):.1f}", f"{frame.y(y):.1f}") for x, y in points]
    if curve.dots:
        return f'<path class="dots s{curve.color}" d="{"".join(f"M{x} {y}h0" for x, y in places)}"/>'
    unknown = [x for x, y in curve.points if math.isnan(y)]
    line, before = "", -1
    for (x, y), (at, _) in zip(places, points, strict=True):
        gap = bisect(unknown, at)
        if gap != before:
            line += f"M{x} {y}h0"
        else:
            line += f"H{x}V{y}" if curve.steps else f"L{x} {y}"
        before = gap
    return f'<path class="line s{curve.color}" d="{line}"/>'


def _rect(level: int, left: float, right: float, what: str) -> str:
    height = _HEIGHTS[level]
    place = f'x="{left:.2f}" width="{max(0.5, right - left):.2f}" y="{20 - height}" height="{height}"'
    return f'<rect class="level{level}" {place}><title>{escape(what)}</title></rect>'


def _line(mark: Mark, frame: _Frame) -> str:
    return f'<path class="mark" d="M{frame.x(mark.at):.1f} 0V{HEIGHT:.0f}"><title>{escape(mark.what)}</title></path>'


def _below(frame: _Frame) -> str:
    """Iterations along the horizontal axis."""
    ends = [round(frame.left + part * (frame.right - frame.left)) for part in (0, 0.25, 0.5, 0.75, 1)]
    return f'<div class="x" aria-hidden="true">{"".join(f"<span>{end:,}</span>" for end in dict.fromkeys(ends))}</div>'


def _spans(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float, int]]:
    """From, to and level where it stays the same."""
    size = max(1, -(-len(points) // (2 * BUCKETS)))
    lows = [
        (some[0][0], int(min(level for _, level in some)))
        for some in (points[at : at + size] for at in range(0, len(points), size))
    ]
    begin, level = lows[0]
    for at, now in lows[1:]:
        if now != level:
            yield begin, at, level
            begin, level = at, now
    yield begin, points[-1][0] + 1, level


def _scaled(unit: str, greatest: float) -> tuple[str, float]:
    """The unit in which the axis is read, and what values are multiplied by."""
    if unit == "s" and greatest < 1:
        return "ms", 1000.0
    if unit == "bytes":
        sizes = ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB"))
        return next(((name, 10.0**-power) for power, name in sizes if greatest >= 10**power), (unit, 1.0))
    return unit, 1.0


def _tick(value: float) -> str:
    if value == 0:
        return "0"
    for power, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.4g}{unit}"
    return f"{value:.4g}"

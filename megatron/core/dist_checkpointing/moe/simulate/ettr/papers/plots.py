"""What the plots of the papers' tables and figures share. Matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....errors import UsageError

COLOURS = {"checkfreq": "tab:blue", "gemini": "tab:orange", "moc": "tab:red", "moevement": "tab:green"}
NAMES = {"checkfreq": "CheckFreq", "gemini": "Gemini", "moc": "MoC", "moevement": "MoEvement"}
SUFFIXES = (".png", ".svg", ".pdf")


@contextmanager
def axes(path: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7, 4.5)) -> Iterator[list[Any]]:
    """The axes of a new figure, row by row, that is written to `path` at the end.

    Raises UsageError for a suffix that stands for no picture, where matplotlib is not installed, and where the file
    cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"plot {path}: give a file that ends in {', '.join(SUFFIXES)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plots need matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield list(figure.subplots(rows, columns, squeeze=False).flat)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UsageError(f"plot {path}: cannot be written: {error.strerror}") from error


def plot(draw: Callable[[list[Any]], None], **layout: Any) -> Callable[[Path], None]:
    """A function that has `draw` draw on `axes` of this layout, into the file that it is given."""

    def into(path: Path) -> None:
        with axes(path, **layout) as found:
            draw(found)

    return into

"""Draws docs/architecture.svg: where state lives, and what happens beside one iteration of training.

`python tools/architecture_picture.py` writes the picture; a test fails when the file and this source differ.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

TARGET = Path(__file__).parents[1] / "docs" / "architecture.svg"
WIDTH, HEIGHT = 1120, 900
INK, SOFT, LINE = "#1f2933", "#52606d", "#7b8794"
TRAINING, MEMORY, PEER, STORAGE, CONTROL = "#dbeafe", "#dcfce7", "#fef3c7", "#ede9fe", "#fee2e2"


class Picture:
    """Shapes in the order in which they are drawn; all lengths in pixels."""

    def __init__(self) -> None:
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, size: int = 13, color: str = INK, anchor: str = "middle") -> None:
        """Lines of text, separated by newlines; `y` is the baseline of the first one."""
        for number, line in enumerate(words.split("\n")):
            at = f'x="{x:g}" y="{y + number * (size + 4):g}"'
            self._shapes.append(
                f'<text {at} font-size="{size}" fill="{color}" text-anchor="{anchor}">{escape(line)}</text>'
            )

    def box(self, x: float, y: float, width: float, height: float, words: str = "", fill: str = "#ffffff") -> None:
        """A rectangle with its text in the middle."""
        where = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._shapes.append(f'<rect {where} rx="5" fill="{fill}" stroke="{LINE}"/>')
        if words:
            middle = y + height / 2 - 8.5 * words.count("\n") + 4.5
            self.text(x + width / 2, middle, words)

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through these points with a head at the last one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.4"{dash} marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The whole file."""
        head = '<path d="M0,0 L9,4.5 L0,9 z" fill="' + INK + '"/>'
        marker = f'<marker id="head" markerWidth="9" markerHeight="9" refX="8" refY="4.5" orient="auto">{head}</marker>'
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
                f"<defs>{marker}</defs>",
                f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
                *self._shapes,
                "</svg>\n",
            )
        )


def draw_nodes(picture: Picture) -> None:
    """Two nodes with their ranks and memory tiers, the peers' replicas, and storage."""
    picture.text(30, 34, "Where state lives", 18, anchor="start")
    for node, left in enumerate((30, 580)):
        picture.box(left, 50, 510, 355, fill="#f8fafc")
        picture.text(left + 12, 72, f"node {node}", 14, SOFT, "start")
        for rank in range(2):
            x = left + 20 + rank * 240
            words = f"rank {2 * node + rank}: training process\npipeline stage {node}, expert rank {rank}"
            picture.box(x, 84, 230, 62, words, TRAINING)
            picture.arrow((x + 70, 146), (x + 70, 214))
        picture.box(left + 20, 190 + 24, 470, 175)
        picture.text(left + 30, 232, "memory tier (tmpfs; survives the process)", 12, SOFT, "start")
        picture.box(left + 34, 244, 210, 60, "own snapshots\ncopying, replicating, protected", MEMORY)
        picture.box(left + 264, 244, 210, 60, "replicas of ranks\nof other nodes", PEER)
        picture.box(left + 34, 316, 210, 58, "boundary logs\nwhat crossed a stage boundary", MEMORY)
        picture.box(left + 264, 316, 210, 58, "parked state of survivors\nand kept gradients", MEMORY)
    picture.arrow((240, 244), (240, 204), (940, 204), (940, 244))
    picture.arrow((720, 304), (720, 310), (400, 310), (400, 304))
    picture.text(130, 174, "copy beside the next passes", 12, SOFT, "start")
    picture.text(515, 198, "replicate: the receiver verifies, then acknowledges", 12, SOFT)
    picture.arrow((560, 116), (580, 116))
    picture.arrow((560, 116), (540, 116))
    picture.text(560, 98, "pipeline P2P", 11, SOFT)
    picture.box(30, 452, 1060, 62, fill=STORAGE)
    picture.text(560, 474, "storage: a folder or an object store")
    picture.text(560, 494, "snapshots of --moe-ckpt-persist-dir; ordinary torch_dist checkpoints of --save", 12, SOFT)
    for x in (140, 690):
        picture.arrow((x, 389), (x, 452))
    picture.text(150, 430, "persist in the background, every --moe-ckpt-persist-interval", 12, SOFT, "start")


def draw_iteration(picture: Picture) -> None:
    """One lane per thread of a rank, over the time of an iteration."""
    picture.text(30, 562, "One iteration of one rank", 18, anchor="start")
    picture.text(1090, 562, "time →", 13, SOFT, "end")
    lanes = ("training thread", "copy engine", "replication worker", "persister", "all ranks")
    for number, name in enumerate(lanes):
        y = 584 + number * 56
        picture.text(30, y + 24, name, 13, SOFT, "start")
        picture.box(170, y, 920, 42, fill="#f8fafc")
    picture.box(176, 588, 96, 34, "step t", TRAINING)
    picture.box(276, 588, 560, 34, "forward and backward of t+1", TRAINING)
    picture.box(840, 588, 86, 34, "reduce", TRAINING)
    picture.box(930, 588, 154, 34, "optimizer step t+1", TRAINING)
    picture.box(276, 644, 400, 34, "copy of what the strategy planned for t", MEMORY)
    picture.arrow((676, 661), (926, 661), (926, 622))
    picture.text(690, 655, "ends before the step, or stalls it", 12, SOFT, "start")
    picture.box(176, 700, 180, 34, "seal t-1 (one rename)", MEMORY)
    picture.box(360, 700, 400, 34, "replicate t-1 to r peers, verify, acknowledge", PEER)
    picture.box(176, 756, 700, 34, "write a snapshot to storage, verified as it is read", STORAGE)
    picture.box(840, 812, 86, 34, "1 message", CONTROL)
    picture.text(826, 833, "what was sealed, replicated and measured; does every rank plan the same?", 12, SOFT, "end")
    picture.arrow((892, 812), (892, 622), dashed=True)
    picture.text(
        30,
        884,
        "A snapshot exists from its rename on; it protects once all peers acknowledged verified bytes.",
        13,
        SOFT,
        "start",
    )


def architecture() -> str:
    """The picture as SVG."""
    picture = Picture()
    draw_nodes(picture)
    draw_iteration(picture)
    return picture.svg()


if __name__ == "__main__":
    TARGET.write_text(architecture(), encoding="utf-8")

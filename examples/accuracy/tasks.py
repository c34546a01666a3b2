"""Two downstream tasks from text that training never saw: the last twentieth of the standard library's sources.

Cloze: which of four words of the same length continues at the end of a text. Original: which of two texts is as someone
wrote it, where the other has two of its words swapped. Both are answered by likelihood, and by chance in 25 % and 50 %
of the cases. All texts are bytes, and the same for every model.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.pretrain.indexed_corpus import open_corpus

HELD_OUT = 0.95
"""From this share of the corpus on is what `--split 90,5,5` keeps for the test."""
CHANCE = {"cloze": 0.25, "original": 0.5}
_WORD = re.compile(rb"[A-Za-z_]{4,12}")
_END = 256
"""The token that ends a document."""


@dataclass(frozen=True)
class TextQuestion:
    """Texts of the same length, of which the first is right. begin: of the bytes whose likelihood counts."""

    task: str
    texts: tuple[bytes, ...]
    begin: int


def questions(prefix: str, count: int, length: int, seed: int = 0) -> list[TextQuestion]:
    """`count` of each task, of texts of at most `length` bytes.

    Raises ValueError where the held-out text has too few.
    """
    documents = list(held_out(prefix))
    words: dict[int, set[bytes]] = {}
    for document in documents:
        for word in _WORD.findall(document):
            words.setdefault(len(word), set()).add(word)
    draw = random.Random(seed)
    known = {size: sorted(found) for size, found in words.items()}
    tasks = {
        "cloze": lambda text: _cloze(text, known, length, draw),
        "original": lambda text: _original(text, length, draw),
    }
    found = []
    for name, make in tasks.items():
        made: list[TextQuestion] = []
        for _ in range(100 * count):
            question = make(draw.choice(documents))
            made += [] if question is None else [question]
            if len(made) == count:
                break
        if len(made) < count:
            raise ValueError(
                f"the last {1 - HELD_OUT:.0%} of {prefix} have {len(made)} questions of {name}, not {count}"
            )
        found += made
    return found


def held_out(prefix: str) -> Iterator[bytes]:
    """The documents of the test split that are long enough to ask about."""
    corpus = open_corpus(prefix)
    lengths = [int(length) for length in corpus.sequence_lengths]
    first = round(HELD_OUT * len(lengths))
    with Path(f"{prefix}.bin").open("rb") as file:
        file.seek(sum(lengths[:first]) * corpus.token_dtype.itemsize)
        for length in lengths[first:]:
            ids = array("H", file.read(length * corpus.token_dtype.itemsize))  # bytes and one more id take 16 bits
            text = bytes(one for one in ids if one < _END)
            if len(text) > 1000:
                yield text


def _cloze(text: bytes, known: dict[int, list[bytes]], length: int, draw: random.Random) -> TextQuestion | None:
    places = [found for found in _WORD.finditer(text) if found.start() > length]
    if not places:
        return None
    place = draw.choice(places)
    word, context = place[0], text[place.end() - length : place.start()]
    others = [other for other in known[len(word)] if other != word]
    if len(others) < 3:
        return None
    return TextQuestion("cloze", tuple(context + one for one in (word, *draw.sample(others, 3))), len(context))


def _original(text: bytes, length: int, draw: random.Random) -> TextQuestion | None:
    begin = draw.randrange(len(text) - length)
    piece = text[begin : begin + length]
    places = list(_WORD.finditer(piece))
    if len({place[0] for place in places}) < 2:
        return None
    first, second = sorted(draw.sample(places, 2), key=lambda place: place.start())
    if first[0] == second[0]:
        return None
    between = piece[first.end() : second.start()]
    other = piece[: first.start()] + second[0] + between + first[0] + piece[second.end() :]
    return TextQuestion("original", (piece, other), min(first.start(), second.start()))


def rows(question: TextQuestion, seq_length: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of its texts, [texts][seq_length + 1], padded behind, and a mask of the labels that count,
    [texts][seq_length]."""
    ids = [[*text, *[_END] * (seq_length + 1 - len(text))] for text in question.texts]
    size = len(question.texts[0])
    mask = [float(question.begin <= place + 1 < size) for place in range(seq_length)]
    return ids, [mask] * len(ids)


def right(scores: Sequence[float]) -> bool:
    """Whether the first of these negative log-likelihoods is the lowest."""
    return all(scores[0] < other for other in scores[1:])

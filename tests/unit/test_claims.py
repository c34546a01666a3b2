"""Numbers that README and the docs state: each stands in the file that `docs/claims.toml` names for it."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLAIMS: list[dict[str, str]] = tomllib.loads((ROOT / "docs" / "claims.toml").read_text("utf-8"))["claim"]
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?![\w]|\.\d)")


def numbers(text: str) -> list[str]:
    return [found.replace(",", "") for found in NUMBER.findall(text)]


def flat(path: str) -> str:
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def stands_in(told: str, lines: list[str]) -> bool:
    """Whether a number is one of these lines', rounded to its decimals, in the same unit or in thousandths."""
    decimals = len(told.partition(".")[2])
    found = [float(one) for line in lines for one in numbers(line)]
    return any(f"{one * scale:.{decimals}f}" == told for one in found for scale in (1, 1000))


def proof_lines(claim: dict[str, Any]) -> list[str]:
    needed = [part.strip() for part in claim["row"].split(", ")]
    lines = (ROOT / claim["proof"]).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if all(part in line for part in needed)]


def wrong(claim: dict[str, str]) -> list[str]:
    """The numbers of a claim that its proof does not have."""
    lines = proof_lines(claim)
    assert lines, f"{claim['proof']} has no line with {claim['row']}"
    return [told for told in numbers(claim["text"]) if not stands_in(told, lines)]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim['page']}: {claim['text'][:40]}")
def test_a_claim_stands_in_its_page_and_its_numbers_in_the_file_that_proves_it(claim: dict[str, str]) -> None:
    assert " ".join(claim["text"].split()) in flat(claim["page"])
    assert numbers(claim["text"])
    assert wrong(claim) == []


def test_a_number_that_the_proof_does_not_have_is_found() -> None:
    claim = next(one for one in CLAIMS if one["text"].startswith("| `torch_dist` | 0.385 | 0.18 ("))
    assert wrong(claim | {"text": claim["text"].replace("0.18 (", "0.19 (")}) == ["0.19"]
    assert wrong(claim | {"text": claim["text"].replace("| 167 |", "| 107 |")}) == ["107"]
    assert wrong(claim | {"text": claim["text"].replace("0.18 (", "-0.18 (")}) == ["-0.18"]


def test_the_rows_of_costs_in_the_readme_are_all_claims() -> None:
    table = re.search(
        r"\n\| \| GB \| overhead, s \(quartiles\) \|.*?\n\n", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
    )
    assert table is not None
    rows = [line for line in table[0].splitlines() if numbers(" | ".join(line.split(" | ")[1:3]))]
    told = [claim["text"] for claim in CLAIMS if claim["page"] == "README.md"]
    assert len(rows) == 11
    assert [row for row in rows if not any(text in row for text in told)] == []


GIVEN = (
    "less than 1 %",
    "An interval of 1 is",
    "10 GB in each iteration",
    "every 100 iterations",
    "every 1,000",
    "every 10,000",
    "2026",
)
"""Numbers of README beside results which are settings, asked for, or dates."""


def test_each_number_that_the_readme_tells_with_a_page_of_results_is_a_claim() -> None:
    text = re.sub(r"\n- ", "\n\n- ", (ROOT / "README.md").read_text("utf-8"))
    blocks = [" ".join(block.split()) for block in text.split("\n\n") if "](docs/results/" in block and block[0] != "|"]
    assert len(blocks) >= 4
    told = [" ".join(claim["text"].split()) for claim in CLAIMS if claim["page"] == "README.md"]
    for block in blocks:
        for known in sorted((*told, *GIVEN), key=len, reverse=True):
            block = block.replace(known, "")
        assert numbers(re.sub(r"\]\([^)]*\)", "]", block)) == [], block


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_what_was_measured_is_of_a_commit_that_is_in_the_history(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    commit = data["kept_by"] if "kept_by" in data else data["machine"]["commit"]
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("the history is not here")
    assert subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT).returncode == 0, commit

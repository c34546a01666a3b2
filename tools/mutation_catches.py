"""Breaks the code in small ways, one after another, and says which of them the tests notice.

`python tools/mutation_catches.py [NAME ...]` runs those of mutations.toml beside it, or only the named ones, each in a
temporary copy of the tree: the tests that are listed with it as `make test` selects them, up to the first failure, and
only where these all pass those that `make test-ci` adds, and then as `make test-full` does. Exit code 1: some are
noticed by the last alone, or by none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTATIONS = Path(__file__).with_name("mutations.toml")
LIMIT_S = 1500.0
"""A mutation under which tests take longer than this makes something wait for ever; that is noticed too."""
TIERS: dict[str, tuple[str, ...]] = {
    "test": (),
    "test-ci": ("-m", "ci and not full"),
    "test-full": ("-m", "", "--hypothesis-profile", "full"),
}
"""What the targets of the Makefile select, the cheapest first."""

# The packages of an editable install are found elsewhere than in the copy: every interpreter of a run is redirected.
REDIRECT = """
import sys
from importlib.util import spec_from_file_location

class Redirect:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("megatron.core.dist_checkpointing.moe", "megatron.pretrain", "moe_ckpt"):
            folder = {root!r} + "/" + name.replace(".", "/")
            return spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])

sys.meta_path.insert(0, Redirect)
"""


@dataclass(frozen=True)
class Mutation:
    """Text of a file that is replaced, which must be there exactly once; arguments of pytest that should notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Change the file under `root`. Raises ValueError where the text is not there once."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.old!r} {text.count(self.old)} times: write it again")
        path.write_text(text.replace(self.old, self.new))


def mutations(path: Path = MUTATIONS) -> list[Mutation]:
    """All of the list. Raises ValueError where one does not fit the code."""
    found = [
        Mutation(name, one["file"], one["old"], one["new"], tuple(one["tests"]))
        for name, one in tomllib.loads(path.read_text()).items()
    ]
    for one in found:
        if (ROOT / one.file).read_text().count(one.old) != 1:
            raise ValueError(f"{one.name}: {one.file} does not have {one.old!r} once: write it again")
    return found


def copied(root: Path) -> None:
    """Put what git knows of the tree below `root`, with its changes."""
    listing = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    for name in listing.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    (root / "sitecustomize.py").write_text(REDIRECT.format(root=str(root)))


def notices(root: Path, tests: Sequence[str], selection: Sequence[str]) -> str:
    """What failed first in the tests of a copy; empty if nothing did."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *selection, *tests]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {LIMIT_S:.0f} s"
    if ended.returncode in (0, 5):
        return ""
    told = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    return told[0] if told else (ended.stdout + ended.stderr)[-300:]


def main() -> int:
    """Runs the chosen mutations, and says what noticed each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--list", action="store_true", help="say which there are, and run nothing")
    parser.add_argument("--tier", choices=TIERS, default="test-full", help="the last to try (default: %(default)s)")
    options = parser.parse_args()
    chosen = [one for one in mutations() if not options.names or one.name in options.names]
    if options.list:
        print("\n".join(one.name for one in chosen))
        return 0
    tried = [*TIERS][: [*TIERS].index(options.tier) + 1]
    caught = {tier: 0 for tier in (*tried, "nothing")}
    for one in chosen:
        begun_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            copied(Path(folder))
            one.apply(Path(folder))
            by, why = "nothing", ""
            for tier in tried:
                if why := notices(Path(folder), one.tests, TIERS[tier]):
                    by = f"make {tier}"
                    break
        caught[by.removeprefix("make ")] += 1
        print(f"{one.name}: noticed by {by} in {time.monotonic() - begun_s:.0f} s {why[:160]}", flush=True)
    print("; ".join(f"{by}: {count}" for by, count in caught.items()))
    return int(caught["nothing"] + caught.get("test-full", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())

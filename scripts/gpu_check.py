"""Check this project on one GPU, in parts that can be run one by one: tests in the order of what they tell.

Results are appended to OUT/results.jsonl, a line for each figure and for the outcome of each test, at the moment it is
known; what tests printed goes to OUT/log.txt. A run that is cut off has all that it found. Where tests of one step fail
or crash, the next ones run: each step has a process of its own. Steps that measure nothing run at once.

With MOE_CKPT_GPU_REHEARSAL=cpu all that can run on a CPU does, small, and what cannot says so.

Exit code: 0 all that ran passed, 1 something failed or nothing ran, 2 nothing can be run here; one line says why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
REHEARSAL = "MOE_CKPT_GPU_REHEARSAL"
POLL_S = 0.5
KILL_AFTER_S = 5.0
"""How long a step may need past the budget to end by itself."""
BUSY_BYTES = 3 << 30
"""Of the GPU in use before anything begins: somebody else's work, in whose company no figure means anything."""
UNTESTED = ("skipped", "not run", "cut off")
NEEDED = (
    "pytest pytest_timeout hypothesis numpy xxhash click fsspec rich tokenizers tensorboard psutil megatron.training"
)

Variables = Mapping[str, str]


@dataclass(frozen=True)
class CheckPart:
    """Steps of pytest, each a process, most telling first.

    steps: One after the other; those of a tuple at once, since only their outcomes count.
    packs: Of the bundle, with `base`, which is always there.
    shm_bytes: What it needs in /dev/shm.
    """

    steps: tuple[str | tuple[str, ...], ...]
    packs: tuple[str, ...] = ()
    shm_bytes: int = 0


PARTS = {
    "facts": CheckPart(("test_machine.py",)),
    "abort": CheckPart(("test_groups_alone.py",)),
    "rates": CheckPart(
        ("test_cuda_rates.py", "test_cuda_capture.py test_cuda_boundary.py", "test_cuda_parking.py"), (), 12 << 30
    ),
    "te": CheckPart(
        (
            "test_engine.py",
            (
                "test_cuda_session.py -k engine-full and not graphs",
                "test_cuda_session.py -k engine-sparse",
                "test_cuda_session.py -k engine-pec",
                "test_cuda_session.py -k layers-full-full",
                "test_cuda_session.py -k layers-full-sparse",
            ),
        ),
        ("te",),
        1 << 30,
    ),
    "ranks": CheckPart(
        (("test_nccl_ranks.py -k p2p or reduce", "test_nccl_ranks.py -k all-to-all or flex"),), ("nccl",), 1 << 30
    ),
    "model": CheckPart(("test_engine.py -k compiled", "test_cuda_model.py"), ("te",), 45 << 30),
    "jobs": CheckPart(
        (
            (
                "test_cuda_session.py -k local-full or trains_as",
                "test_cuda_session.py -k local-sparse or local-pec or captured_router",
                "test_cuda_session.py -k iterations-full",
                "test_cuda_session.py -k iterations-sparse",
                "test_cuda_session.py -k layers and not engine",
                "test_cuda_training.py test_cuda_transport.py test_cuda_graphs_released.py",
            ),
        ),
        (),
        1 << 30,
    ),
}
"""What is run by which name, in the order of a check without `--part`."""

FACTS = f"""
import importlib.util, json
def lacks(name):
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True
found = dict(missing=[name for name in {NEEDED.split()!r} if lacks(name)])
try:
    import torch
except Exception as error:
    print(json.dumps(found | dict(error=f"torch cannot be imported: {{error}}"))); raise SystemExit
found |= dict(torch=torch.__version__, cuda=torch.version.cuda)
try:
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    sm = torch.cuda.get_device_capability()
    found |= dict(device=torch.cuda.get_device_name(), sm=10 * sm[0] + sm[1], used_bytes=total - free, bytes=total)
except Exception as error:
    found["error"] = str(error).splitlines()[0]
print(json.dumps(found))
"""


class UnusableMachine(Exception):
    """What keeps a part, or all of them, from running here; the text says what to do."""


class OneLine(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        """As argparse does, without the usage."""
        self.exit(2, f"gpu-check: {message}\n")


def main(argv: list[str]) -> int:
    """See above."""
    given = arguments(argv)
    until_s, rehearsed = time.monotonic() + given.budget, os.environ.get(REHEARSAL) == "cpu"
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        machine = asked()
        check(machine, rehearsed)
    except (UnusableMachine, OSError) as error:
        sys.stderr.write(f"gpu-check: nothing was tested: {error}\n")
        return 2
    results = Results(given.out.resolve() / "results.jsonl")
    results.add({"run": machine | {"parts": given.part, "budget_s": given.budget, "rehearsed": rehearsed}})
    for name in given.part:
        try:
            environment = prepared(name, machine, rehearsed)
        except UnusableMachine as error:
            results.add({"part": name, "outcome": "not run", "why": str(error)})
            continue
        for step in PARTS[name].steps:
            run(name, at_once(step), environment, until_s, results)
    return results.told()


class Results:
    """The file of results, to which tests add while this process shows what comes.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin = self._shown = path.stat().st_size if path.exists() else 0
        self._counts, self._untested = Counter[str](), set[str]()

    def add(self, line: Mapping[str, Any]) -> None:
        """A line, on disk when this returns."""
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def show(self) -> None:
        """Print what was added since the last call, and count it; a line that is half there waits."""
        with self.path.open("rb") as file:
            file.seek(self._shown)
            added = file.read()
        added = added[: added.rfind(b"\n") + 1]
        self._shown += len(added)
        sys.stdout.write(added.decode())
        sys.stdout.flush()
        for line in map(json.loads, added.splitlines()):
            if "outcome" in line:
                self._counts[line["outcome"]] += 1
                self._untested |= {line["why"]} if line["outcome"] in UNTESTED else set()

    def told(self) -> int:
        """Say what was not tested; the exit code."""
        self.show()
        for why in sorted(self._untested):
            sys.stderr.write(f"gpu-check: NOT tested: {why}\n")
        print(f"gpu-check: {', '.join(f'{count} {name}' for name, count in self._counts.items())}; {self.path}")
        if not self._counts["passed"]:
            sys.stderr.write("gpu-check: nothing was tested: no test ran\n")
        return int(not self._counts["passed"] or self._counts["failed"] > 0)


def arguments(argv: list[str]) -> argparse.Namespace:
    """Those of the command line."""
    parser = OneLine(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--part", default=",".join(PARTS), help=f"names with commas: {', '.join(PARTS)} (default: all of them)"
    )
    parser.add_argument("--budget", type=float, default=86400.0, help="seconds; tests that would take longer wait")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", help="folder of results")
    given = parser.parse_args(argv)
    given.part = given.part.split(",")
    for name in given.part:
        if name not in PARTS:
            parser.error(f"no part {name!r} (expected {', '.join(PARTS)}, or several with commas)")
    if given.budget <= 0:
        parser.error(f"invalid --budget: {given.budget:g} (expected seconds above 0)")
    return given


def asked() -> dict[str, Any]:
    """What torch says of this machine, in a process that then leaves the GPU alone."""
    done = subprocess.run([sys.executable, "-c", FACTS], capture_output=True, text=True, timeout=300, check=False)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return dict(json.loads(line))
    raise UnusableMachine(
        f"torch crashed when it was asked for the GPU: {(done.stderr.splitlines() or ['no output'])[-1]}"
    )


def check(machine: dict[str, Any], rehearsed: bool) -> None:
    """Refuse a machine on which no part can run."""
    if "torch" not in machine:
        raise UnusableMachine(f"{machine['error']}; set MOE_CKPT_PYTHON to an interpreter that has it")
    if tuple(int(part) for part in machine["torch"].split("+")[0].split(".")[:2]) < (2, 8):
        raise UnusableMachine(f"torch {machine['torch']} is not supported (expected 2.8 and newer)")
    if machine["missing"]:
        raise UnusableMachine(
            f"missing packages: {', '.join(machine['missing'])}; run `make gpu-bundle`, or `make setup`"
        )
    if rehearsed:
        return
    built = f"torch {machine['torch']}"
    if machine["cuda"] is None:
        raise UnusableMachine(f"{built} is built for CPUs: install one for CUDA, or rehearse with {REHEARSAL}=cpu")
    if "error" in machine:
        raise UnusableMachine(f"{built} for CUDA {machine['cuda']}: {machine['error']}")
    if machine["used_bytes"] > BUSY_BYTES:
        used, total = machine["used_bytes"] / 1e9, machine["bytes"] / 1e9
        raise UnusableMachine(
            f"GPU in use: {used:.1f} of {total:.1f} GB are taken; end that work (nvidia-smi) or choose another"
        )


def prepared(name: str, machine: dict[str, Any], rehearsed: bool) -> dict[str, str]:
    """The environment of a part. Raises UnusableMachine where it cannot run on this machine."""
    part, environment = PARTS[name], dict(os.environ)
    if not rehearsed and (free := shutil.disk_usage("/dev/shm").free) < part.shm_bytes:
        size = f"{part.shm_bytes >> 30}G"
        raise UnusableMachine(
            f"/dev/shm has {free / 1e9:.1f} GB free, {size} are needed: mount -o remount,size={size} /dev/shm"
        )
    site = os.environ.get("MOE_CKPT_GPU_SITE")
    for pack in part.packs if site is not None else ():
        folder = Path(site or "") / pack
        about = folder / f"{pack}.json"
        if not about.is_file():
            if rehearsed:
                continue
            raise UnusableMachine(f"pack {pack} is not here: bring {pack}.tar.xz of `make gpu-bundle` along")
        made_for = json.loads(about.read_text())["sm"]
        if not rehearsed and made_for != machine["sm"]:
            raise UnusableMachine(
                f"pack {pack} is for sm_{made_for}, but this GPU is sm_{machine['sm']}: "
                f"run `make gpu-bundle SM={machine['sm']}`"
            )
        environment |= of_pack(pack, folder, rehearsed)
    return environment


def of_pack(pack: str, folder: Path, rehearsed: bool) -> Variables:
    """What makes processes use it."""
    if pack == "te":
        if rehearsed:
            return {"MOE_CKPT_TE_PYTHON": str(folder)}
        return {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{folder}", "MOE_CKPT_GPU_TE": str(folder)}
    return {"MOE_CKPT_GPU_NCCL": str(folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2")}


def at_once(step: str | tuple[str, ...]) -> tuple[str, ...]:
    """The steps that run at once."""
    return (step,) if isinstance(step, str) else step


def run(name: str, steps: Sequence[str], environment: Variables, until_s: float, results: Results) -> None:
    """A process of pytest for each of these steps, all at once, until the budget is used up."""
    if time.monotonic() > until_s:
        for step in steps:
            results.add({"part": name, "outcome": "not run", "why": f"the budget: {step} was not begun"})
        return
    out = results.path.parent
    given = dict(environment) | {"MOE_CKPT_GPU_PART": name, "MOE_CKPT_GPU_UNTIL_S": str(until_s)}
    given["MOE_CKPT_GPU_OUT"] = str(out)
    with contextlib.ExitStack() as stack:
        running = []
        for step in steps:
            printed = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(of_pytest(step), cwd=ROOT, env=given, stdout=printed, stderr=subprocess.STDOUT)
            running.append((step, process, printed))
        while any(process.poll() is None for _, process, _ in running) and time.monotonic() < until_s + KILL_AFTER_S:
            time.sleep(POLL_S)
            results.show()
        for step, process, printed in running:
            if (code := process.poll()) is None:
                end(process)
                results.add({"part": name, "outcome": "cut off", "why": f"the budget: {step} was cut off"})
            elif code not in (0, 1, 5):  # 1: tests failed, each with a line of its own; 5: no test
                why = f"{step}: pytest ended with {code}, see log.txt"
                results.add({"part": name, "outcome": "failed", "why": why})
            with (out / "log.txt").open("ab") as log:
                printed.seek(0)
                shutil.copyfileobj(printed, log)


def of_pytest(step: str) -> list[str]:
    """The command that runs a step."""
    files, _, chosen = step.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "--timeout=0"]
    return command + [f"tests/gpu/{file}" for file in files.split()] + (["-k", chosen] if chosen else [])


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it started, workers in sessions of their own too."""
    for pid in (*descendants(process.pid), process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process started, and those that these started."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in map(int, children.read_text().split()):
                yield child
                yield from descendants(child)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

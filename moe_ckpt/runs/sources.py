"""Finds the runs that a path stands for: a file of --metrics-jsonl, a folder with some, the folder of a drill."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.small_files import read_small

from .accounts import DrillResult, InjectedFault, Run
from .run_log import number, read_run

DRILL_RESULT = "result.json"
NAMES = ("metrics.jsonl", "reports")
MOST_BYTES = 64 << 20
"""Of the result of a drill: it has a line for each fault."""
MOST = 12
"""Runs of one page."""


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """All runs, each under a name of its own.

    Raises UsageError for a path that stands for none, UnreadableCheckpoint for a file without a line of a job.
    """
    runs = [run for path in paths for run in _runs_at(path)]
    if len(runs) > MOST:
        raise UsageError(f"{len(runs)} runs are too many for one page: give at most {MOST}")
    seen: dict[str, int] = {}
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        if seen[run.name] > 1:
            run.log.name = f"{run.name} ({seen[run.name]})"
    return runs


def _runs_at(path: Path) -> list[Run]:
    if path.is_file() or (path.exists() and not path.is_dir()):
        return [Run(read_run(path, _name_of(path)))]
    if not path.is_dir():
        raise UsageError(f"{path} does not exist; give a file of --metrics-jsonl, or its folder")
    if (path / DRILL_RESULT).exists():
        return list(_of_drill(path))
    files = [path / name for name in NAMES if (path / name).is_file()] or sorted(path.glob("*.jsonl"))
    if not files:
        raise UsageError(f"{path} has no metrics.jsonl, reports or other *.jsonl; give the file of --metrics-jsonl")
    found, problems = [], []
    for file in files:
        try:
            if not file.is_file():  # a FIFO that is given by its name is read, one that lies somewhere is not
                raise UnreadableCheckpoint(f"{file} is no regular file")
            found.append(Run(read_run(file, _name_of(file))))
        except UnreadableCheckpoint as error:
            problems.append(error)
    if not found:
        raise problems[0]
    found[0].log.notes += [f"{error}; it is left out" for error in problems]
    return found


def _name_of(file: Path) -> str:
    return file.resolve().parent.name if file.name in NAMES else file.stem


def _of_drill(folder: Path) -> Iterator[Run]:
    """The job that was examined, and the one with stock checkpoints if there is one."""
    try:
        data = json.loads(read_small(folder / DRILL_RESULT, MOST_BYTES, through_links=True))
        results = {name: data[name] for name in ("subject", "baseline") if isinstance(data.get(name), dict)}
    except (OSError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise UnreadableCheckpoint(f"{folder / DRILL_RESULT} is not the result of a drill: {error}") from error
    stock = number(results.get("baseline", {}).get("ettr"))
    for name, result in results.items():
        file = folder / name / "reports"
        if not file.is_file():
            continue
        run = Run(read_run(file, f"{folder.resolve().name}/{name}"), _struck(result.get("faults")))
        wrong = [*_listed(result.get("wrong")), *_listed(result.get("wrong_components"))]
        ettr = number(result.get("ettr"))
        run.drill = DrillResult(not wrong, _known(ettr), _known(stock) if name == "subject" else None, len(wrong))
        yield run


def _struck(data: Any) -> tuple[InjectedFault, ...]:
    return tuple(_struck_one(fault) for fault in _listed(data) if isinstance(fault, dict))


def _struck_one(fault: Mapping[str, Any]) -> InjectedFault:
    after = number(fault.get("after_iteration"))
    node = f" ({fault['node']})" if fault.get("node") else ""
    return InjectedFault(f"{fault.get('kind')} {fault.get('target')}{node}", int(after) if after >= 0 else 0)


def _listed(data: Any) -> list[Any]:
    return data if isinstance(data, list) else []


def _known(value: float) -> float | None:
    return value if value == value else None

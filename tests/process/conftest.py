"""A world of worker processes and a small corpus, shared by all process tests."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from attempts import Cluster
from digested_runs import ended
from engine import world_with_engine
from runs import Launch, Layout, Start, Train, flags
from sparse_runs import LENGTH, Case, FaultFree, Run
from sparse_runs import fault_free as run_fault_free
from world import HANG_TIMEOUT_S, Hook, Outcome, Running, World, node_memory, run_to_end

from megatron.pretrain.preprocess import PreprocessRequest, preprocess


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    started = World(tmp_path_factory.mktemp("world"))
    yield started
    started.kill()


@pytest.fixture(scope="module")
def engine_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from world_with_engine(tmp_path_factory.mktemp("engine-world"))


@pytest.fixture
def engine_cluster(engine_world: World, corpus: str) -> Iterator[Cluster]:
    """As `cluster`, with Transformer Engine."""
    with node_memory() as folder:
        yield Cluster(engine_world, corpus, folder)


@pytest.fixture(scope="module")
def undisturbed(engine_world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Run]:
    """The training of a case with Transformer Engine, without faults and protection; trained once."""
    kept: dict[object, Run] = {}

    def run(case: Case) -> Run:
        if case.training not in kept:
            folder = tmp_path_factory.mktemp("undisturbed")
            given = (*LENGTH, *case.model, "--metrics-jsonl", folder / "reports")
            kept[case.training] = ended(engine_world, corpus, case.layout, folder, *given)
        return kept[case.training]

    return run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a corpus of made-up words, enough for a few hundred samples."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(3)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(60)]
    documents = [" ".join(draw.choices(words, k=200)) for _ in range(60)]
    for i, document in enumerate(documents):
        (folder / f"{i:03}.txt").write_text(document)
    request = PreprocessRequest(
        inputs=(str(folder / "*.txt"),),
        json_keys=("text",),
        output_prefix=str(folder / "words"),
        tokenizer_type="ByteTokenizer",
        tokenizer_model=None,
        vocab_size=None,
        append_eod=True,
        workers=1,
    )
    (summary,) = preprocess(request, lambda documents, tokens: None)
    return summary.prefix


@pytest.fixture
def start(world: World, corpus: str) -> Start:
    """Starts a job: `start(layout, *flags, hooks=(), distributed=True)`."""

    def start_job(layout: Layout, *extra: object, hooks: Sequence[Hook] = (), distributed: bool = True) -> Running:
        argv = flags(corpus, layout, *map(str, extra), distributed=distributed)
        return world.start(argv, layout.ranks, hooks)

    return start_job


@pytest.fixture
def train(start: Start) -> Train:
    """Runs a job to its end, which must be a good one: `train(layout, *flags, hooks=(), distributed=True)`."""

    def run(layout: Layout, *extra: object, hooks: Sequence[Hook] = (), distributed: bool = True) -> Outcome:
        outcome = start(layout, *extra, hooks=hooks, distributed=distributed).wait()
        assert set(outcome.codes) == {0}, outcome.said
        return outcome

    return run


@pytest.fixture(scope="session")
def undisturbed_run(world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Where a job with these flags, without faults and snapshots, left its checkpoint and `reports`; each runs once."""
    made: dict[object, Path] = {}

    def run(layout: Layout, *extra: str, distributed: bool = True) -> Path:
        key = layout, extra, distributed
        if key not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            saving = ["--save", str(folder), "--metrics-jsonl", str(folder / "reports")]
            outcome = world.run(flags(corpus, layout, *extra, *saving, distributed=distributed), layout.ranks)
            assert set(outcome.codes) == {0}, outcome.said
            made[key] = folder
        return made[key]

    return run


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return tmp_path / "save"


@pytest.fixture
def cluster(world: World, corpus: str) -> Iterator[Cluster]:
    """Runs jobs that are killed and restarted, with their memory tier on the machine's tmpfs."""
    with node_memory() as folder:
        yield Cluster(world, corpus, folder)


@pytest.fixture(scope="session")
def fault_free_runs() -> dict[object, Run]:
    """By what is trained."""
    return {}


@pytest.fixture
def fault_free(
    world: World,
    corpus: str,
    fault_free_runs: dict[object, Run],
    tmp_path_factory: pytest.TempPathFactory,
) -> FaultFree:
    """The run of a case without faults and protection; cases that train the same share it."""

    def run(case: Case) -> Run:
        if case.training not in fault_free_runs:
            fault_free_runs[case.training] = run_fault_free(world, corpus, case, tmp_path_factory.mktemp("fault-free"))
        return fault_free_runs[case.training]

    return run


@pytest.fixture
def launch(corpus: str, tmp_path: Path) -> Launch:
    """Runs a command in the root of the repository, and all it started ends with it."""

    def run(
        command: list[str], *, timeout_s: float = HANG_TIMEOUT_S, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        own = {
            "MOE_CKPT_PYTHON": sys.executable,
            "MOE_CKPT_CORPUS": corpus,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(scratch),
        }
        return run_to_end(command, timeout_s, **own | environment)

    return run

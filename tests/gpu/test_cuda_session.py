"""Protected jobs on one GPU: killed and started again they come to the same bits; skipped where there is none."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_driver import DETERMINISTIC, ENGINE, LOCAL, Job, corpus, needs_engine
from gpu_place import needs_cuda, needs_device

from megatron.core.dist_checkpointing.moe.megatron_state.popularity import TokenCounter
from megatron.core.transformer.moe.router import TopKRouter

pytestmark = needs_device

STRATEGIES = {
    "full": ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "1"),
    "sparse": ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "3"),
    "pec": ("--moe-ckpt-strategy", "pec", "--moe-ckpt-interval", "1", "--moe-ckpt-pec-k-snapshot", "2"),
}
PADDED = (
    # Shapes do not depend on the router: nothing is read back from the device.
    *"--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity".split(),
)
# Captures of modules draw from generators, and leave them where that moved them: refused with dropout.
UNDRAWN = "--hidden-dropout 0 --attention-dropout 0".split()
GRAPHS = {
    "whole-iterations": (
        *LOCAL, *PADDED, "--cuda-graph-impl", "full_iteration", "--no-check-for-nan-in-loss-and-grad",
        *"--hidden-dropout 0.1 --attention-dropout 0.1".split(),
    ),
    # Of Megatron-Core's own layers `attn` captures all of each, its experts too.
    "layers": (*LOCAL, *PADDED, *UNDRAWN, "--cuda-graph-impl", "local", "--cuda-graph-modules", "attn"),
    "engine-layers-full": (
        *ENGINE, *UNDRAWN, "--moe-token-dispatcher-type", "alltoall",
        *"--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess".split(),
    ),
}  # fmt: skip
WARM = ("--cuda-graph-warmup-steps", "2")
FAULT = ("--moe-ckpt-inject-fault", "0@8:forward-backward")


def router() -> TopKRouter:
    """On its own, of four experts; tokens say where they go."""

    class Fixed(TopKRouter):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.layer_number, self.weight = 1, torch.nn.Parameter(torch.zeros(1, device="cuda"))
            self.config = SimpleNamespace(num_moe_experts=4, moe_pad_expert_input_to_capacity=False)

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return tokens, tokens > 0

    return Fixed()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module", params=["local", "transformer engine"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data: str) -> Job:
    """A job that nothing happens to: all that are killed are compared with it."""
    if request.param != "local":
        needs_engine()
    model = (*(LOCAL if request.param == "local" else ENGINE), *DETERMINISTIC)
    folder = tmp_path_factory.mktemp("straight")
    job = Job(folder / "straight", folder, data, model)
    assert job.run() == 0, job.last
    return job


@pytest.mark.takes(60)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_killed_job_comes_back_where_it_was(name: str, straight: Job, tmp_path: Path, shm: Path, data: str) -> None:
    model = straight.flags
    protected = (*STRATEGIES[name], "--moe-ckpt-memory-dir", str(shm))
    killed = Job(tmp_path / "killed", shm, data, (*model, *protected, *FAULT))
    assert killed.run() == -signal.SIGKILL, killed.last
    assert killed.run() == 0, killed.last
    assert "recovered iteration" in killed.said[-1], killed.last
    if name == "pec":  # loses updates of experts, and says how many tokens
        assert killed.losses().keys() == straight.losses().keys()
        return
    assert killed.losses() == straight.losses()
    if name == "sparse":
        replayed = [report["iteration"] for report in killed.reports if report["replayed"]]
        assert replayed, "nothing was run again with frozen operators"


@pytest.mark.takes(60)
def test_a_protected_job_trains_as_an_unprotected_one(tmp_path: Path, shm: Path, data: str) -> None:
    model = (*LOCAL, *DETERMINISTIC)
    plain = Job(tmp_path / "plain", shm, data, model)
    protected = Job(tmp_path / "protected", shm, data, (*model, *STRATEGIES["full"], "--moe-ckpt-memory-dir", str(shm)))
    assert [plain.run(), protected.run()] == [0, 0], protected.last
    assert protected.losses() == plain.losses()
    assert not [line for line in protected.said[-1].splitlines() if "cannot page-lock" in line]


@pytest.mark.takes(90)
@needs_cuda("CUDA graphs were")
@pytest.mark.parametrize("strategy", ["full", "sparse"])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_killed_job_with_graphs_comes_back_where_it_was(
    graphs: str, strategy: str, tmp_path: Path, shm: Path, data: str
) -> None:
    """Struck behind the capture; what it draws for dropout comes from generators that the graphs refer to."""
    if graphs.startswith("engine"):
        needs_engine()
    model = (*GRAPHS[graphs], *WARM, *DETERMINISTIC)
    straight = Job(tmp_path / "straight", tmp_path, data, model)
    assert straight.run() == 0, straight.last
    protected = (*STRATEGIES[strategy], "--moe-ckpt-memory-dir", str(shm), *FAULT)
    killed = Job(tmp_path / "killed", shm, data, (*model, *protected))
    assert killed.run() == -signal.SIGKILL, killed.last
    assert killed.run() == 0, killed.last
    assert "recovered iteration" in killed.said[-1], killed.last
    assert killed.losses() == straight.losses()
    assert any(report["replayed"] for report in killed.reports) == (strategy == "sparse")


@pytest.mark.takes(10)
@needs_cuda("CUDA graphs were")
def test_a_captured_router_counts_its_tokens_at_each_replay() -> None:
    layer, tokens = router(), torch.eye(4, device="cuda").repeat(3, 1)
    counter, graph = TokenCounter([layer]), torch.cuda.CUDAGraph()
    layer(tokens)
    torch.cuda.synchronize()
    eagerly = counter.take()()
    with torch.cuda.graph(graph):
        layer(tokens)
    assert counter.take()() == {0: (0, 0, 0, 0)}
    for replays in (1, 2):
        for _ in range(replays):
            graph.replay()
        assert counter.take()() == {0: tuple(replays * count for count in eagerly[0])}

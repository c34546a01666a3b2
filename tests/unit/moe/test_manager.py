"""What a training loop may do with a manager, and what it is told when it does something else; no processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from stock_stand_in import one_rank

from megatron.core import num_microbatches_calculator as batches
from megatron.core.dist_checkpointing.moe import manager
from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.core_versions import training
from megatron.core.dist_checkpointing.moe.errors import (
    NewProcessesNeeded,
    PeerLost,
    ReplayDiverged,
    StoreFailure,
    Terminated,
    UsageError,
)
from megatron.core.dist_checkpointing.moe.manager import MoECheckpointManager
from megatron.core.dist_checkpointing.moe.megatron_state.pass_state import PassState
from megatron.core.dist_checkpointing.moe.policy.parking import Cause
from megatron.core.dist_checkpointing.moe.runtime import iterations
from megatron.core.dist_checkpointing.moe.runtime.faults import FaultInjector, Termination
from megatron.core.dist_checkpointing.moe.runtime.iterations import ORDER, Iterations, LoopCall, LoopPhase
from megatron.core.dist_checkpointing.moe.runtime.session import Session
from megatron.core.dist_checkpointing.moe.runtime.watcher import Interrupted
from megatron.core.dist_checkpointing.moe.standby.heartbeat import (
    FOLDER,
    Activity,
    Heartbeat,
    own_heartbeat,
    read_beat,
)
from megatron.core.dist_checkpointing.moe.stock.hooks import Hooks
from megatron.core.dist_checkpointing.moe.stock.iteration import mean_loss
from megatron.core.dist_checkpointing.moe.types import StepJournal
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.paged_stash import PagedStashRunner


class Optimizer:
    """Steps as Megatron-Core's do."""

    def __init__(self) -> None:
        self.steps = 0
        self.error: Exception | None = None
        self.norm: Any = 0.5

    def step(self) -> tuple[bool, Any, None]:
        if self.error is not None:
            raise self.error
        self.steps += 1
        return True, self.norm, None


class Noting(Session):
    """Notes what it is called for."""

    protects = True

    def __init__(self, replayed: int = 0, *, recovers: bool = False, communicator: Any = None) -> None:
        self.calls: list[Any] = []
        super().__init__()
        self.replayed, self.recovers, self.through = replayed, recovers, communicator

    @property
    def communicator(self) -> Any:
        return self.through

    @property
    def is_replaying(self) -> bool:  # type: ignore[override]
        return self.replayed > 0

    def begin(self, iteration: int) -> None:
        self.calls.append(("begin", iteration))

    def rejoin(self) -> bool:
        self.calls.append("rejoin")
        return self.recovers

    def before_optimizer(self) -> float:
        self.calls.append("before_optimizer")
        return 0.0

    def stepping(self, iteration: int, passed: StepJournal) -> AbstractContextManager[None]:
        self.calls.append(("stepping", iteration, passed))
        return nullcontext()

    def on_state_consistent(self, iteration: int, journal: StepJournal) -> None:
        self.calls.append(("whole", iteration))

    def stepped(self, step: StepJournal) -> None:
        self.replayed -= 1
        self.calls.append(("stepped", step.grad_norm))

    @property
    def coordinator(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(step_end=lambda iteration, journal: self.calls.append(("step_end", iteration, journal)))

    def failure(self, cause: Cause) -> None:
        self.calls.append(cause)

    def shutdown(self, *, keep_memory: bool) -> None:
        self.calls.append("shutdown")


class Loop:
    """A loop, its optimizer, and what follows them."""

    def __init__(
        self, session: Noting | None = None, *, replays: bool = False, passes_change: PassState | None = None
    ) -> None:
        self.session, self.optimizer, self.trainer = session or Noting(), Optimizer(), SimpleNamespace(iteration=0)
        self.config = SimpleNamespace(finalize_model_grads_func=lambda chunks, num_tokens=None: None)
        faults, self.termination = FaultInjector([], 0, None), Termination()
        live: Any = (self.optimizer, self.config, self.trainer)
        self.hooks = Iterations(
            self.session, *live, faults=faults, termination=self.termination, replays=replays,
            passes_change=passes_change,
        )  # fmt: skip
        self.hooks.restored()


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterations, "close_connections", lambda: 0)


def test_three_calls_are_enough_and_come_in_the_order_that_a_session_needs() -> None:
    loop = Loop()
    for _ in range(2):
        loop.optimizer.step()
        loop.hooks.after_step(2.0)
    one = ["before_optimizer", ("stepping", 1, StepJournal()), ("whole", 1)]
    assert loop.session.calls[:6] == [("begin", 0), "rejoin", *one, ("step_end", 1, StepJournal(0.5, False, 2.0))]
    assert loop.optimizer.steps == loop.trainer.iteration == 2


def test_a_loss_that_is_known_before_the_step_and_the_tokens_of_the_batch_reach_the_session() -> None:
    import torch

    loop = Loop(Noting(communicator="logs"), replays=True)
    with loop.hooks.forward_backward():
        loop.config.finalize_model_grads_func([], torch.tensor(96))
    loop.hooks.loss = 3.0
    loop.optimizer.step()
    (passed,) = [call[2] for call in loop.session.calls if call[0] == "stepping"]
    assert passed.to_data() == StepJournal(None, False, 3.0, 96).to_data()


def test_the_session_learns_before_the_step_that_pages_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedStashRunner, "check_moe_overflow", lambda _: (1, 0, 0))
    loop = Loop()
    with loop.hooks.forward_backward():
        PagedStashRunner.check_moe_overflow(SimpleNamespace())
    loop.optimizer.step()
    loop.hooks.after_step()
    assert [call[2] for call in loop.session.calls if call[0] == "stepping"] == [StepJournal(out_of_pages=True)]
    assert ("step_end", 1, StepJournal(0.5, out_of_pages=True)) in loop.session.calls


def test_passes_run_no_code_of_protection_where_no_stage_replays_alone_since_a_graph_would_capture_it() -> None:
    loop = Loop(replays=True)
    finalize = loop.config.finalize_model_grads_func
    with loop.hooks.forward_backward():
        assert loop.config.finalize_model_grads_func is finalize


def test_no_number_of_a_step_is_read_from_the_device_while_training_could_continue() -> None:
    """Each would make the host wait for all that the device was given, in every iteration."""
    import torch

    reads: list[str] = []

    class Made(torch.Tensor):
        """Made by a device: whoever reads it waits."""

        def item(self) -> Any:
            reads.append("item")
            return super().item()

        def __float__(self) -> float:
            reads.append("float")
            return super().__float__()

        def __int__(self) -> int:
            reads.append("int")
            return super().__int__()

    def made(value: float) -> torch.Tensor:
        return torch.tensor(value).as_subclass(Made)

    loop = Loop(Noting(communicator="logs"), replays=True)
    loop.optimizer.norm = made(0.25)
    with loop.hooks.forward_backward():
        loop.config.finalize_model_grads_func([], made(96))
    loop.hooks.loss = mean_loss([{"lm loss": made(3.0)}])
    loop.optimizer.step()
    loop.hooks.after_step()
    assert reads == []
    journal = loop.hooks.journal.to_data()
    assert journal == {"grad_norm": 0.25, "skipped": False, "lm_loss": 3.0, "num_tokens": 96}


@pytest.mark.parametrize(
    ("recovers", "doing"), [(True, Activity.REJOINED), (False, Activity.STARTING)], ids=["recovered", "started"]
)
def test_a_launcher_that_looks_for_hangs_waits_for_the_first_iteration_after_a_recovery_not_after_a_start(
    recovers: bool, doing: Activity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Heartbeat(str(tmp_path))
    monkeypatch.setattr(iterations, "own_heartbeat", lambda: own)
    loop = Loop(Noting(recovers=recovers))
    loop.hooks.begin()
    said = [read_beat(tmp_path, os.getpid())]
    loop.hooks.rejoin()
    said.append(read_beat(tmp_path, os.getpid()))
    assert [None if beat is None else beat.doing for beat in said] == [Activity.STARTING, doing]


@pytest.mark.parametrize(("replayed", "told"), [(0, [1]), (1, [])], ids=["trained", "run again"])
def test_a_launcher_is_told_of_an_iteration_that_was_trained_not_of_one_that_was_run_again(
    replayed: int, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[int]()
    monkeypatch.setattr(iterations, "note_iteration", lambda: found.append(1))
    loop = Loop(Noting(replayed))
    with loop.hooks.forward_backward():
        pass
    loop.optimizer.step()
    loop.hooks.after_step()
    assert found == told


@pytest.mark.parametrize(
    ("error", "doing"),
    [
        (PeerLost("rank 1 closed its connection"), Activity.LOST_A_PEER),
        (RuntimeError("Connection closed by peer [10.0.0.1]:7"), Activity.LOST_A_PEER),
        (StoreFailure("storage is full"), Activity.LOST_A_PEER),
        (NewProcessesNeeded("all ranks start again"), Activity.LOST_A_PEER),
        (RuntimeError("CUDA error"), Activity.LOADING),
    ],
)
@pytest.mark.parametrize("where", ["builds", "connects", "loads"])
def test_a_launcher_sees_whether_a_rank_is_to_blame_before_training_began(
    where: str, error: Exception, doing: Activity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    def builds() -> None:
        with Hooks(None, "", None):
            fails()

    model: Any = torch.nn.Module()
    model.config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    config = MoECheckpointConfig(strategy="full")
    sizes = {"train_iters": 1, "global_batch_size": 1, "micro_batch_size": 1, "seq_length": 1}
    made: Any = SimpleNamespace(_session=SimpleNamespace(restore=fails), _trainer=None, abandon=lambda: None)
    starts: dict[str, Callable[[], object]] = {
        "builds": builds,
        "connects": lambda: MoECheckpointManager([model], cast("Any", Optimizer()), config=config, **sizes),
        "loads": lambda: MoECheckpointManager.resume(made),
    }
    monkeypatch.setattr(manager, "ProtectedSession", fails)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    own_heartbeat.cache_clear()
    own_heartbeat().loads()
    with pytest.raises(type(error)), one_rank():
        starts[where]()
    own_heartbeat.cache_clear()
    found = read_beat(tmp_path, os.getpid())
    assert found is not None and found.doing is doing


@pytest.mark.parametrize(
    ("cause", "doing"),
    [
        (ReplayDiverged("it gave another loss"), Activity.LOST_A_PEER),
        (StoreFailure("storage is full"), Activity.LOST_A_PEER),
        (ValueError("a sample"), Activity.LEFT),
    ],
)
def test_a_launcher_sees_that_no_rank_is_to_blame_for_what_ends_all_of_them(
    cause: Exception, doing: Activity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Heartbeat(str(tmp_path))
    monkeypatch.setattr(manager, "own_heartbeat", lambda: own)
    block, error = running(Standing(cause=None), []), RuntimeError("training ends")
    error.__cause__ = cause
    assert not block.__exit__(RuntimeError, error, None)
    found = read_beat(tmp_path, os.getpid())
    assert found is not None and found.doing is doing


def test_replayed_iterations_end_with_their_record_and_ranks_rejoin_behind_them() -> None:
    loop = Loop(Noting(replayed=2))
    for _ in range(3):
        with loop.hooks.forward_backward():
            pass
        loop.optimizer.step()
        loop.hooks.after_step(None)
    names = [call[0] if isinstance(call, tuple) else call for call in loop.session.calls]
    assert [name for name in names if name in ("stepped", "rejoin", "step_end")] == [
        "stepped", "stepped", "rejoin", "step_end",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("calls", "mistake"),
    [
        (["step", "step"], r"iteration 1: optimizer.step\(\) came before manager.after_step\(\)"),
        (
            ["step", "passes"],
            r"iteration 1: manager.forward_backward\(\) came before manager.after_step",
        ),
        (["after"], r"manager.after_step\(\) came without an optimizer.step\(\) before it"),
        (["step", "after", "after"], r"iteration 1: manager.after_step\(\) came without an optimizer.step\(\)"),
        (["step", "finish"], r"the end of training came before manager.after_step\(\)"),
    ],
    ids=["never after the step", "skipped", "without a step", "twice", "at the end"],
)
def test_a_call_that_is_missing_or_made_twice_is_named_with_its_iteration(calls: list[str], mistake: str) -> None:
    loop = Loop()

    def passes() -> None:
        with loop.hooks.forward_backward():
            pass

    made = {
        "step": loop.optimizer.step,
        "passes": passes,
        "after": lambda: loop.hooks.after_step(None),
        "finish": lambda: loop.hooks.finish(keep_memory=False),
    }
    for name in calls[:-1]:
        (loop.optimizer.step if name == "step" else made[name])()
    protected = [call for call in loop.session.calls if isinstance(call, tuple) and call[0] == "step_end"]
    with pytest.raises(UsageError, match=mistake):
        (loop.optimizer.step if calls[-1] == "step" else made[calls[-1]])()
    assert [call for call in loop.session.calls if isinstance(call, tuple) and call[0] == "step_end"] == protected


def test_sparse_asks_for_the_block_around_the_passes() -> None:
    with pytest.raises(UsageError, match=r"sparse needs manager.forward_backward\(\)"):
        Loop(replays=True).optimizer.step()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (PeerLost("rank 3 did not answer"), Cause.PEER_LOST),
        (RuntimeError("[pair.cc:544] Connection closed by peer [127.0.0.1]:4711"), Cause.PEER_LOST),
        (Terminated("told to end"), Cause.TOLD_TO_END),
        (ValueError("anything"), Cause.OWN_ERROR),
    ],
    ids=["peer", "gloo", "SIGTERM", "own"],
)
def test_what_is_parked_depends_on_why_training_ends(error: Exception, cause: Cause) -> None:
    loop = Loop()
    loop.hooks.leave(error)
    assert loop.session.calls[-1] is cause


def test_the_device_comes_to_the_newest_update_before_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, calls = Loop(), list[str]()
    monkeypatch.setattr(loop.session, "await_update", lambda: calls.append("updated"))
    monkeypatch.setattr(iterations, "close_connections", lambda: calls.append("closed"))
    loop.hooks.leave(Terminated("told to end"))
    assert calls == ["updated", "closed"]


def test_nothing_is_parked_between_the_optimizers_step_and_what_belongs_to_it() -> None:
    loop = Loop()
    loop.optimizer.step()
    loop.hooks.leave(PeerLost("rank 3 did not answer"))
    assert loop.session.calls[-1] is Cause.OWN_ERROR


def test_a_peer_that_is_lost_inside_the_step_is_judged_by_how_far_that_came() -> None:
    loop = Loop()
    loop.optimizer.error = RuntimeError("Connection reset by peer")
    with pytest.raises(RuntimeError, match="Connection reset"):
        loop.optimizer.step()
    loop.hooks.leave(loop.optimizer.error)
    assert loop.session.calls[-1] is Cause.PEER_LOST


def test_the_optimizer_is_left_as_it_was_found() -> None:
    loop = Loop()
    loop.optimizer.step()
    loop.hooks.after_step(None)
    assert "step" in vars(loop.optimizer)
    loop.hooks.finish(keep_memory=False)
    assert "step" not in vars(loop.optimizer)
    assert loop.session.calls[-1] == "shutdown"


def test_every_phase_of_a_loop_can_be_left_and_no_call_is_without_a_place() -> None:
    assert {phase for phase, _ in ORDER} == set(LoopPhase) == set(ORDER.values())
    assert {call for _, call in ORDER} == set(LoopCall)


def test_passes_that_are_interrupted_leave_no_auxiliary_losses_of_half_an_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = [1.0]
    monkeypatch.setattr(iterations, "forget_auxiliary_losses", noted.clear)

    def pass_once(loop: Loop, *errors: Exception) -> None:
        with loop.hooks.forward_backward():
            for error in errors:
                raise error

    pass_once(Loop())
    assert noted == [1.0]
    with pytest.raises(PeerLost):
        pass_once(Loop(), PeerLost("rank 3 did not answer"))
    assert not noted


def test_what_fails_after_connections_were_given_up_is_nobodys_fault() -> None:
    loop = Loop()
    loop.hooks.begin()
    loop.hooks.leave(ValueError("no such group"), Cause.TOLD_TO_END)
    assert loop.session.calls[-1] is Cause.TOLD_TO_END


class Standing:
    """A watcher that was interrupting the main thread, so that its first answer may be that error."""

    def __init__(self, *errors: Exception, cause: Cause | None = Cause.PEER_LOST) -> None:
        self.errors, self.interrupted, self.stopped, self.hung_up = list(errors), cause, list[bool](), False

    def stand_down(self) -> None:
        if self.errors:
            raise self.errors.pop()

    def stop(self, *, is_good: bool) -> None:
        self.stopped.append(is_good)


def running(watcher: Standing, left: list[Cause | None]) -> Any:
    """The block of `run`, entered, of a manager that notes why it leaves."""
    fields = {
        "_session": SimpleNamespace(parks=False, protects=True, leases=None), "iteration": 3, "_train_iters": 5,
        "finish": lambda **options: None, "_finished": False, "_judged": nullcontext,
        "_watch": lambda: watcher, "_termination": Termination(), "leave": lambda error, cause: left.append(cause),
    }  # fmt: skip
    block = MoECheckpointManager.run(SimpleNamespace(**fields))  # type: ignore[arg-type]
    block.__enter__()
    return block


def test_a_rank_leaves_in_order_though_the_watchers_error_comes_on_its_way_out() -> None:
    left: list[Cause | None] = []
    watcher = Standing(Interrupted())
    block = running(watcher, left)
    assert not block.__exit__(RuntimeError, RuntimeError("aborted"), None)
    assert left == [Cause.PEER_LOST]
    assert watcher.stopped == [False]


def test_a_rank_leaves_in_order_though_that_error_kept_the_end_of_the_block_from_being_called() -> None:
    left: list[Cause | None] = []
    watcher = Standing()
    block = running(watcher, left)
    del block
    assert left == [Cause.PEER_LOST]
    assert watcher.stopped == [False]


DRAWING = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"], "attention_dropout": 0.1}
CAPACITY = {"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_router"], "moe_expert_capacity_factor": 1.0}


@pytest.mark.parametrize(
    ("strategy", "model", "said"),
    [
        ("full", DRAWING, "--cuda-graph-impl transformer_engine does not go with .* attention_dropout 0.1: a capture"),
        ("selective", CAPACITY, "--cuda-graph-impl local does not go with --moe-ckpt-capacity-boost 10"),
    ],
)
def test_graphs_that_no_strategy_can_be_exact_with_are_refused_in_any_loop(
    strategy: str, model: dict[str, Any], said: str
) -> None:
    config = SimpleNamespace(num_moe_experts=8, pipeline_model_parallel_size=1, **model)
    with pytest.raises(UsageError, match=said):
        manager.refuse_contradictions(MoECheckpointConfig(strategy=strategy), chunk(), config)


def test_batches_that_grow_are_refused_in_any_loop_where_tokens_are_counted_or_iterations_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = SimpleNamespace(num_moe_experts=8)
    growing: Any = object.__new__(batches.NumMicroBatchesCalculator.__subclasses__()[-1])
    for strategy in ("full", "pec", "selective", "sparse"):
        config = MoECheckpointConfig(strategy=strategy)
        for calculator in (None, batches.ConstantNumMicroBatchesCalculator(4, 1, 1, False, 0)):
            monkeypatch.setattr(batches, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator)
            manager.refuse_contradictions(config, chunk(), model)
        monkeypatch.setattr(batches, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", growing)
        refused = nullcontext() if strategy == "full" else pytest.raises(UsageError, match="batches of several sizes")
        with refused:
            manager.refuse_contradictions(config, chunk(), model)


def chunk() -> Any:
    return SimpleNamespace(ddp_config=None)


@pytest.mark.parametrize(("rooms", "moved"), [(0, 0.0), (1, 1.0)])
def test_passes_that_found_no_page_begin_again_with_expert_biases_as_they_were(
    rooms: int, moved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process has no pages in its first iteration. That tokens had no room comes out again there, so it counts."""
    runner = SimpleNamespace(check_moe_overflow=lambda _self: (1, rooms, 0))
    monkeypatch.setattr(training.paged_stash, "PagedStashRunner", runner)
    router = torch.nn.Module()
    router.register_buffer("expert_bias", torch.zeros(4))
    loop = Loop(passes_change=PassState([router.expert_bias]))
    loop.config.moe_paged_stash = True
    with loop.hooks.forward_backward():
        router.expert_bias.add_(1.0)
        assert runner.check_moe_overflow(None) == (1, rooms, 0)
        assert router.expert_bias.tolist() == [moved] * 4

"""The order of calls of a stock loop, under hooks; the loop is a stand-in, and so is the manager."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stock_stand_in import Manager, Optimizer, arguments, one_rank, stand_in

from megatron.core import full_cuda_graph
from megatron.core.dist_checkpointing.moe.errors import CheckpointFailure, UsageError
from megatron.core.dist_checkpointing.moe.in_place.process_groups import release
from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import SAMPLES
from megatron.core.dist_checkpointing.moe.replay.patches import graphs_off
from megatron.core.dist_checkpointing.moe.stock.dense import StockSaves, _refuse_others
from megatron.core.dist_checkpointing.moe.stock.hooks import Hooks
from megatron.core.dist_checkpointing.moe.stock.seams import SEAMS, Call, installed

ITERATION = "( passes ) optimizer reduce reduce step_done log callbacks after_step reported"


def train(args: Any, manager: Manager | None = None, removed: str | None = None, **options: Any) -> str:
    """All that happens in a job, in its order."""
    loop = stand_in(args, **options)
    manager = manager or Manager(loop.calls)
    manager.calls = loop.calls
    hooks = Hooks(loop, "0.19.2", manager)
    wrapped = dict(hooks.by_name()) | ({removed: Call.go_on} if removed else {})
    installing = installed(loop, wrapped, "0.19.2", is_on=hooks.is_on)
    with one_rank(), contextlib.suppress(SystemExit, CheckpointFailure), hooks, installing:
        loop.pretrain()
    return " ".join(loop.calls)


def test_each_iteration_is_protected_in_order() -> None:
    assert train(arguments()) == f"begin data rejoin {ITERATION} {ITERATION} {ITERATION} finish"


def test_a_checkpoint_and_an_evaluation_come_before_the_snapshot() -> None:
    said = train(arguments(save="somewhere", do_valid=True, train_iters=2))
    assert said.split("step_done")[2].startswith(" log evaluation passes callbacks save saved after_step reported")


CAPTURED, REPLAYED = (ITERATION.replace("passes", one) for one in ("[ passes ] replay", "replay"))


def test_passes_that_are_run_again_are_protected_again() -> None:
    said = train(arguments(train_iters=1), reruns=(1,))
    assert said == f"begin data rejoin ( passes ) {ITERATION} finish"


class Graph:
    """A stand-in for a CUDA graph: `[`, what was captured, `]`; a replay runs none of it again."""

    def __init__(self) -> None:
        self.generators: list[Any] = []

    def register_generator_state(self, generator: Any) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        Optimizer.calls.append("replay")

    def reset(self) -> None:
        Optimizer.calls.append("reset")


@contextlib.contextmanager
def capturing(graph: Graph, **_of_core: Any) -> Iterator[None]:
    Optimizer.calls.append("[")
    yield
    Optimizer.calls.append("]")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core's own wrapper of whole iterations, over such graphs."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    places = {"Stream": lambda: stream, "graph": capturing, "CUDAGraph": Graph, "synchronize": lambda: None}
    for name, value in (places | {"graph_pool_handle": lambda: (0, 1), "current_stream": lambda: stream}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(full_cuda_graph, "get_all_rng_states", dict)
    for name in ("curr_iteration", "cuda_graph", "result"):  # core keeps them by class
        kept = getattr(full_cuda_graph.FullCudaGraphWrapper, name)
        monkeypatch.setattr(full_cuda_graph.FullCudaGraphWrapper, name, dict(kept))


@pytest.mark.usefixtures("graphs")
def test_a_graph_of_whole_iterations_has_passes_in_it_and_no_call_of_protection() -> None:
    said = train(arguments(cuda_graph_impl="full_iteration"))
    assert said == f"begin data rejoin {ITERATION} {CAPTURED} {REPLAYED} finish"


@pytest.mark.parametrize("flag", ["", "finetune", "no_load_optim"])
def test_of_a_checkpoint_some_flags_load_a_part(flag: str) -> None:
    manager = Manager([])
    train(arguments(load="somewhere", **({flag: True} if flag else {})), manager)
    assert manager.loads_in_part is bool(flag)


@pytest.mark.parametrize("before", [[3, 0, 5], None])
def test_a_checkpoint_has_the_count_of_tokens_that_faults_cost_and_hands_it_on(
    before: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(saves: StockSaves, _: object) -> tuple[int, int]:
        saves.recorded_args = SimpleNamespace(**({} if before is None else {"tokens_lost_in_faults": before}))
        return 1, 0

    monkeypatch.setattr(StockSaves, "load", load)
    manager, args = Manager([]), arguments(load="somewhere", save="somewhere")
    train(args, manager)
    assert manager.lost_tokens == before
    assert getattr(args, "tokens_lost_in_faults", None) == before
    assert "save" in manager.calls or "saved" in manager.calls


@pytest.mark.usefixtures("graphs")
def test_a_process_that_stays_captures_whole_iterations_again_together_with_a_new_one() -> None:
    """A new process runs its first iteration eagerly, and captures the second behind a barrier of all ranks."""
    in_new_process = train(arguments(cuda_graph_impl="full_iteration"))
    release([])
    assert Optimizer.calls.pop() == "reset"
    assert train(arguments(cuda_graph_impl="full_iteration")) == in_new_process


class Replaying(Manager):
    """Runs iterations again as a session does: graphs are passed by until the last of them."""

    def begin(self) -> None:
        super().begin()
        self._off = contextlib.ExitStack()
        if self.is_replaying:
            self._off.enter_context(graphs_off())

    def after_step(self) -> None:
        super().after_step()
        if not self.is_replaying:
            self._off.close()


REPEATED = "( passes ) optimizer reduce reduce step_done after_step reported"


@pytest.mark.usefixtures("graphs")
def test_iterations_are_run_again_eagerly_and_the_first_new_one_warms_up_as_in_a_new_process() -> None:
    args = arguments(cuda_graph_impl="full_iteration", moe_ckpt_strategy="sparse", train_iters=7)
    said = train(args, Replaying([], found=2, replays=2))
    assert said == f"resume data begin {REPEATED} {REPEATED} rejoin {ITERATION} {CAPTURED} {REPLAYED} finish"


@pytest.mark.parametrize(("replays", "warm_up"), [(0, 0), (0, 2), (1, 1), (1, 3), (3, 0), (3, 1), (3, 2)])
def test_modules_are_captured_behind_a_replay_and_so_many_new_iterations_as_the_flag_says(
    replays: int, warm_up: int
) -> None:
    """The loop counts from where it was entered, which is before the replay."""
    flags = {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": warm_up}
    args = arguments(**flags, moe_ckpt_strategy="sparse", train_iters=2 + replays + 5)
    said = train(args, Replaying([], found=2, replays=replays))
    assert said.count("capture") == 1
    before, _ = said.split("capture")
    assert before.count("step_done") == replays + (max(1, warm_up) if replays else warm_up)


def test_an_iteration_without_a_step_is_not_protected() -> None:
    assert train(arguments(broken_iteration=1)) == "begin data rejoin ( passes ) finish"


@pytest.mark.parametrize(("place", "reduced"), [("verdict", "reduce"), ("loss", "reduce reduce")])
def test_an_iteration_is_counted_though_a_peer_is_lost_in_what_is_agreed_on_behind_its_update(
    place: str, reduced: str
) -> None:
    manager = Manager([])
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        train(arguments(lost_in=place), manager)
    said = " ".join(manager.calls)
    assert said == f"begin data rejoin ( passes ) optimizer {reduced} step_done left with RuntimeError"


def test_a_job_that_leaves_early_keeps_what_no_checkpoint_has() -> None:
    assert train(arguments(exit_interval=1)).endswith("reported finish, memory kept left with SystemExit")


def test_a_job_that_leaves_with_a_checkpoint_keeps_nothing() -> None:
    assert train(arguments(exit_interval=2, save="somewhere")).endswith("reported finish left with SystemExit")


@pytest.mark.parametrize("left_out", ["no_save_optim", "no_save_rng"])
def test_a_job_that_leaves_with_a_part_of_its_state_in_a_checkpoint_keeps_its_memory(left_out: str) -> None:
    said = train(arguments(exit_interval=2, save="somewhere", **{left_out: True}))
    assert said.endswith("save saved after_step reported finish, memory kept left with SystemExit")


def test_memory_goes_when_the_last_checkpoint_is_saved_and_not_before() -> None:
    assert train(arguments(save="somewhere", save_interval=9)).endswith("reported save saved finish")


def test_what_is_newer_than_the_checkpoint_is_taken_in_its_place() -> None:
    said = train(arguments(load="somewhere"), Manager([], found=2))
    assert said == f"resume begin data rejoin {ITERATION} finish"


def test_without_anything_newer_the_checkpoint_is_loaded() -> None:
    assert train(arguments(load="somewhere")) == f"load begin data, guessed rejoin {ITERATION} finish"


def test_evaluations_read_on_where_they_stood_though_nothing_was_read_yet() -> None:
    said = train(arguments(load="somewhere"), Manager([], found=2))
    assert " data " in said
    assert "guessed" not in said


@pytest.mark.parametrize(("evaluated", "made_up"), [(1, "evaluation "), (2, "")])
def test_an_evaluation_is_made_up_for_where_the_fault_kept_from_it(evaluated: int, made_up: str) -> None:
    args, recorded = arguments(do_valid=True), {"evaluated_iteration": evaluated, "consumed_valid_samples": 24}
    said = train(args, Manager([], found=2, recorded=recorded))
    assert said == f"resume begin data rejoin {made_up}{ITERATION} finish"
    assert args.consumed_valid_samples == 24 + 8 * bool(made_up)


def test_an_evaluation_that_is_made_up_for_ends_at_no_limit_of_time_which_leaves_modules_in_evaluation() -> None:
    args = arguments(do_valid=True, exit_duration_in_mins=5)
    said = train(args, Manager([], found=2, recorded={"evaluated_iteration": 1, "consumed_valid_samples": 24}))
    assert said == f"resume begin data rejoin evaluation {ITERATION} finish"
    assert args.exit_duration_in_mins == 5


@pytest.mark.parametrize("other", [{"eval_interval": 3}, {"do_valid": False}, {"start_eval_at_iter": 3}])
def test_an_evaluation_that_was_not_due_is_not_made_up_for(other: dict[str, Any]) -> None:
    args = arguments(**{"do_valid": True, "train_iters": 2} | other)
    assert "evaluation" not in train(args, Manager([], found=2, recorded={"evaluated_iteration": 1}))


@pytest.mark.parametrize(("newest", "made_up"), [(None, "save saved "), ("1", "save saved "), ("2", ""), ("4", "")])
def test_a_save_is_made_up_for_where_the_fault_kept_from_it(newest: str | None, made_up: str, tmp_path: Path) -> None:
    if newest is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(newest)
    said = train(arguments(save=str(tmp_path)), Manager([], found=2))
    assert said == f"resume begin data rejoin {made_up}{ITERATION} save saved finish"


@pytest.mark.parametrize(("before", "made_up"), [(2, "save saved "), (4, ""), (0, "")])
def test_a_save_where_the_batch_grows_is_made_up_for(before: int, made_up: str) -> None:
    """0: of a snapshot that has no batch size."""
    args = arguments(save="somewhere", save_interval=9)
    said = train(args, Manager([], found=2, recorded={SAMPLES: before}))
    assert said == f"resume begin data rejoin {made_up}{ITERATION} save saved finish"


def test_nothing_is_made_up_for_where_training_begins_from_a_checkpoint() -> None:
    said = train(arguments(load="somewhere", save="elsewhere", do_valid=True)).split("rejoin")
    assert said[1].startswith(" ( passes )")


def test_what_is_missing_from_the_last_iteration_is_made_up_for_behind_the_loop() -> None:
    args = arguments(train_iters=2, save="somewhere", do_valid=True)
    said = train(args, Manager([], found=2, recorded={"evaluated_iteration": 1}))
    assert said == "resume begin data rejoin evaluation save saved save saved finish"


def test_a_replay_of_the_last_iteration_is_joined_before_the_loop_ends() -> None:
    said = train(arguments(overlap_param_gather=True, train_iters=1), Manager([], replays=1))
    assert said.endswith("after_step reported rejoin hooks of the model finish")


def test_iterations_are_run_again_under_the_flags_of_before_or_not_at_all() -> None:
    flags = {"clip_grad": 1.0, "seq_length": 8, "global_batch_size": 4, "micro_batch_size": 2}
    same, other = arguments(clip_grad=1.0), arguments(clip_grad=0.5, log_interval=3)
    assert "passes" in train(same, Manager([], found=1, replays=1, recorded={"flags": flags}))
    with pytest.raises(UsageError, match=r"but --clip-grad was 1\.0 and is 0\.5: start with"):
        train(other, Manager([], found=1, replays=1, recorded={"flags": flags}))
    assert "passes" in train(other, Manager([], found=1, recorded={"flags": flags}))
    captured = arguments(clip_grad=1.0, cuda_graph_impl="full_iteration")
    with pytest.raises(UsageError, match=r"but --cuda-graph-impl was none and is full_iteration: start with"):
        train(captured, Manager([], found=1, replays=1, recorded={"flags": flags}))


def test_a_replay_is_not_logged_saved_or_evaluated() -> None:
    args = arguments(save="somewhere", do_valid=True, train_iters=2, save_interval=1, eval_interval=1)
    said = train(args, Manager([], replays=1)).split(" rejoin ")
    assert said[0] == "data begin ( passes ) optimizer reduce reduce step_done after_step reported"
    assert "evaluation" in said[1]
    assert args.do_valid


def test_weights_that_a_replay_has_yet_to_restore_are_not_compared_between_replicas() -> None:
    args, waiting = arguments(train_iters=1, check_weight_hash_across_dp_replicas_interval=5), Manager([])
    assert "data hashes rejoin" in train(args)
    assert "hashes" not in train(args, Manager([], replays=1))
    waiting.repeats_steps = True
    assert "hashes" not in train(args, waiting)


def test_a_replay_overwrites_no_file_of_gradients_and_weights() -> None:
    """Those of its frozen operators would be missing, or old."""
    args = arguments(train_iters=2, save_wgrads_interval=1, save_dgrads_interval=1)
    replayed, new = train(args, Manager([], replays=1)).split(" rejoin ")
    assert "grads" not in replayed
    assert "dgrads wgrads optimizer" in new


@pytest.mark.parametrize("replays", [0, 1])
def test_a_test_of_gpus_draws_nothing_that_training_draws(replays: int) -> None:
    said = train(arguments(train_iters=1, gpu_sniff_test_interval=5), Manager([], replays=replays))
    assert "sniff test" in said
    assert "generator moved" not in said


def test_a_replay_sums_up_no_parameters_over_stages_that_wait() -> None:
    args = arguments(train_iters=2, log_params_norm=True)
    replayed, new = train(args, Manager([], replays=1, alone=True)).split(" rejoin ")
    assert "norm of parameters" not in replayed
    assert "norm of parameters" in new
    assert args.log_params_norm


def test_a_replay_begins_in_the_first_iteration_behind_what_the_loop_sets_up() -> None:
    said = train(arguments(overlap_param_gather=True, train_iters=2), Manager([], replays=1))
    assert said.index("begin") < said.index("rejoin hooks of the model")


def test_stages_that_replay_alone_reduce_nothing_over_others() -> None:
    said = train(arguments(train_iters=1), Manager([], replays=1, alone=True))
    assert said.startswith("data begin ( passes ) optimizer step_done after_step reported rejoin")


def test_stages_send_through_the_communicator_of_the_manager() -> None:
    said = train(arguments(train_iters=1, do_valid=True, eval_interval=1), Manager([], communicator="ours"))
    assert "( passes through ours )" in said
    assert "evaluation passes " in said


def test_what_the_loop_does_once_after_its_start_is_done_where_all_ranks_train_together() -> None:
    once = {"name_first": True, "distributed_timeout_seconds_after_init": 300}
    replayed = train(arguments(train_iters=5, **once), Manager([], replays=2, alone=True)).split()
    assert replayed.count("timeout") == replayed.count("first") == 1
    assert replayed.index("rejoin") < replayed.index("first") < replayed.index("timeout")
    plain = train(arguments(train_iters=5, **once), Manager([])).split()
    assert plain.index("first") < plain.index("timeout")


@pytest.mark.parametrize(
    ("flag", "ranks", "refused"),
    [
        ("context_parallel_size", 1, True),
        ("use_tp_pp_dp_mapping", 1, True),
        ("pipeline_model_parallel_layout", 1, True),
        ("ddp_bucket_size", 2, True),
        ("overlap_grad_reduce", 2, True),
        ("overlap_grad_reduce", 1, False),
    ],
)
def test_state_of_few_bits_loads_where_ranks_have_the_shards_that_they_saved(
    flag: str, ranks: int, refused: bool
) -> None:
    args = SimpleNamespace(load="there", data_parallel_size=ranks, context_parallel_size=1, overlap_grad_reduce=1)
    saved = SimpleNamespace(**vars(args) | {flag: 2})
    said = pytest.raises(UsageError, match=f"but {flag} was 2 and is .*; train with the same")
    with said if refused else contextlib.nullcontext():
        _refuse_others(saved, args)


def test_without_a_strategy_nothing_is_called() -> None:
    said = train(arguments(moe_ckpt_strategy="none", train_iters=1, world_size=1))
    assert said == "data passes optimizer reduce reduce log callbacks"


@pytest.mark.parametrize("removed", [seam.name for seam in SEAMS["0.19"]])
def test_no_seam_can_go_without_a_trace(removed: str) -> None:
    """With one seam less, some job comes out in another order."""
    jobs = {
        "plain": (arguments(), lambda: Manager([])),
        "loaded": (arguments(load="somewhere"), lambda: Manager([], found=2)),
        "saved": (arguments(exit_interval=2, save="somewhere"), lambda: Manager([])),
        "not to be written": (arguments(save="/dev/null/save", ckpt_format="torch_dist"), lambda: Manager([])),
        "replayed": (
            arguments(
                overlap_param_gather=True,
                do_valid=True,
                eval_interval=1,
                name_first=True,
                distributed_timeout_seconds_after_init=300,
                check_weight_hash_across_dp_replicas_interval=5,
                gpu_sniff_test_interval=5,
                save_dgrads_interval=1,
                save_wgrads_interval=1,
            ),
            lambda: Manager([], replays=2, alone=True),
        ),
    }
    changed = []
    for name, (args, manager) in jobs.items():
        before = train(arguments(**vars(args)), manager())
        try:
            after = train(arguments(**vars(args)), manager(), removed=removed)
        except Exception as error:
            after = repr(error)
        changed += [name] if after != before else []
    assert changed

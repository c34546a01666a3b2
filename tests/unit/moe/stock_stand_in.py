"""A stand-in for the module that has the stock loop: the same functions, called in the same order, around nothing.

Its functions have the homes and parameters that `stock.seams` asks for, so that hooks can be installed without
Megatron-LM. `calls` is what happened, in its order.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.runtime.session import Loadable
from megatron.core.dist_checkpointing.moe.stock.seams import SEAMS
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

_LOOP = """
def pretrain():
    args = get_args()
    model, optimizer, scheduler = setup_model_and_optimizer()
    build_train_valid_test_data_iterators(None)
    args.curr_iteration = 0
    train(None, model, optimizer, scheduler, None, None, None, config_of(args), {}, None)
    if args.save:
        save_checkpoint_and_time(args.train_iters, model, optimizer, scheduler, 0, {})

def build_train_valid_test_data_iterators(provider):
    args = get_args()
    guessed = args.iteration > 0 and args.consumed_valid_samples == 0
    calls.append("data, guessed" if guessed else "data")

def evaluate_and_print_results(prefix, forward_step_func, data_iterator, model, iteration, process_non_loss_data_func,
                               config, verbose=False, write_to_tensorboard=True, non_loss_data_func=None):
    calls.append("evaluation, may end early" if getattr(get_args(), "exit_duration_in_mins", None) else "evaluation")
    get_args().consumed_valid_samples += 8

def setup_model_and_optimizer():
    args, built = get_args(), (["model"], Optimizer(), None)
    if args.load:
        args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(*built)
    return built

def train(forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator, valid_data_iterator,
          process_non_loss_data_func, config, checkpointing_context, non_loss_data_func):
    args, reruns, memory_flag = get_args(), list(args_reruns), True
    iteration, operations, is_first, entered = args.iteration, 0, True, args.iteration
    forward_backward = get_forward_backward_func()
    if args.cuda_graph_impl == "full_iteration":
        forward_backward = FullCudaGraphWrapper(forward_backward, cuda_graph_warmup_steps=1)
    if args.cuda_graph_impl == "transformer_engine":
        helper = TECudaGraphHelper()
    should_exit = False
    if args.overlap_param_gather:
        enable_forward_pre_hook(model)
    if args.gpu_sniff_test_interval is not None:
        before = torch.get_rng_state()
        _run_gpu_sniff_test("before training")
        if not torch.equal(torch.get_rng_state(), before):
            calls.append("generator moved")
    if args.check_weight_hash_across_dp_replicas_interval is not None:
        assert check_param_hashes_across_dp_replicas(model, cross_check=True)
    while iteration < args.train_iters and not should_exit:
        if iteration == entered + 1 and args.distributed_timeout_seconds_after_init is not None:
            update_pg_timeout(args.distributed_timeout_seconds_after_init)
        if (args.cuda_graph_impl == "transformer_engine" and not helper.capture_finished()
                and iteration - entered == args.cuda_graph_warmup_steps):
            helper.create_cudagraphs()
        args.curr_iteration = iteration
        passes = 2 if iteration + 1 in reruns else 1
        outcome = train_step(None, None, model, optimizer, opt_param_scheduler, None, forward_backward, passes)
        if outcome[3]:
            break
        iteration += 1
        args.consumed_train_samples += args.global_batch_size
        operations += num_floating_point_operations(args, args.global_batch_size)
        if args.log_params_norm:
            calls.append("norm of parameters")
        memory_flag = training_log({}, {}, 0.0, iteration, 1.0, memory_flag, 0, None, None, None, None,
                                   is_first_iteration=is_first)
        is_first = False
        if iteration % args.eval_interval == 0 and args.do_valid:
            evaluate_and_print_results("", None, None, model, iteration, None, None)
            forward_backward(forward_only=True)
        post_training_step_callbacks(model, optimizer, opt_param_scheduler, iteration, None, 0.0)
        should_exit = checkpoint_and_decide_exit(
            model, optimizer, opt_param_scheduler, iteration, operations, {}, None)
    if should_exit:
        raise SystemExit(0)

def get_forward_backward_func():
    def forward_backward(forward_only, p2p_communicator=None, pg_collection=None, **of_core):
        calls.append('passes' if p2p_communicator is None else f'passes through {p2p_communicator}')
        return []
    return forward_backward

def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config,
               forward_backward_func, passes):
    for _ in range(passes):
        losses = forward_backward_func(forward_only=False, model=model, data_iterator=data_iterator,
                                       num_microbatches=2, seq_length=8)
    if get_args().save_dgrads_interval is not None:
        save_dgrads(get_args().curr_iteration + 1)
    if get_args().save_wgrads_interval is not None:
        save_grads(get_args().save, {}, get_args().curr_iteration + 1, "wgrads")
    if get_args().curr_iteration + 1 == get_args().broken_iteration:
        return {}, True, False, True, 17, None, None, 0
    updated, grad_norm, zeros = optimizer.step()
    updated = logical_and_across_model_parallel_group(updated)
    grad_norm = reduce_max_stat_across_model_parallel_group(grad_norm)
    collective("loss")
    return {}, 0, False, False, 0, grad_norm, zeros, 0

def _run_gpu_sniff_test(tag):
    calls.append("sniff test")
    torch.rand(1)

def training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter,
                 grad_norm, params_norm, num_zeros_in_grad, max_attention_logit, is_first_iteration=False):
    calls.append("log first" if is_first_iteration and get_args().name_first else "log")
    return False

def post_training_step_callbacks(model, optimizer, opt_param_scheduler, iteration, prof,
                                 num_floating_point_operations_since_last_log_event):
    calls.append("callbacks")
    return num_floating_point_operations_since_last_log_event

def checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration,
                               num_floating_point_operations_so_far, checkpointing_context, train_data_iterator):
    args = get_args()
    if args.save and iteration % args.save_interval == 0:
        save_checkpoint_and_time(iteration, model, optimizer, opt_param_scheduler, 0, {})
    return iteration == args.exit_interval

def save_checkpoint_and_time(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far,
                             checkpointing_context, non_persistent_ckpt=False, train_data_iterator=None):
    save_checkpoint(iteration, model, optimizer, opt_param_scheduler, 0)

def enable_forward_pre_hook(model_chunks):
    calls.append("hooks of the model")

def num_floating_point_operations(args, samples):
    return 10**20 * samples

def get_num_microbatches():
    return 2

def update_num_microbatches(samples, consistency_check=True):
    pass
"""

_ELSEWHERE = {
    "load_checkpoint": (
        "def load_checkpoint(ddp_model, optimizer, opt_param_scheduler, load_arg='load'):\n"
        "    calls.append('load')\n"
        "    return 2, 7\n"
    ),
    "save_checkpoint": (
        "def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, operations, non_persistent_ckpt=False,\n"
        "                    release=False):\n"
        "    calls.append('save')\n"
    ),
    "check_param_hashes_across_dp_replicas": (
        "def check_param_hashes_across_dp_replicas(model, cross_check=False):\n"
        "    calls.append('hashes')\n"
        "    return True\n"
    ),
    "save_dgrads": "def save_dgrads(iteration):\n    calls.append('dgrads')\n",
    "save_grads": "def save_grads(save_dir, state_dict, iteration, grad_label):\n    calls.append(grad_label)\n",
    "update_pg_timeout": "def update_pg_timeout(timeout, pg=None):\n    calls.append('timeout')\n",
    "logical_and_across_model_parallel_group": (
        "def logical_and_across_model_parallel_group(input):\n"
        "    calls.append('reduce')\n"
        "    collective('verdict')\n"
        "    return input\n"
    ),
    "reduce_max_stat_across_model_parallel_group": (
        "def reduce_max_stat_across_model_parallel_group(stat):\n    calls.append('reduce')\n    return stat\n"
    ),
}


class ModulesOfEngine(TECudaGraphHelper):  # type: ignore[misc]
    """Core's helper, of a model without layers; says when it captures."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(fine_grained_activation_offloading=False)
        self.model, self.optimizers, self.flattened_callables = [], [], []
        self._capture_finished = self._graphs_created = False

    def create_cudagraphs(self) -> None:
        """Core's own, on a device that has none of this."""
        Optimizer.calls.append("capture")
        device = dict.fromkeys(("synchronize", "empty_cache"), lambda: None)
        with (
            mock.patch.multiple("torch.cuda", **device),
            mock.patch("megatron.core.distributed.finalize_model_grads.reset_model_temporary_tensors"),
        ):
            super().create_cudagraphs()


class Optimizer:
    """Steps, and says so; a chain of none, with nothing to load into."""

    calls: list[str]
    chained_optimizers = ()

    def step(self) -> tuple[bool, float, None]:
        self.calls.append("optimizer")
        return True, 0.1, None


def arguments(**values: Any) -> argparse.Namespace:
    """What the loop reads, and the flags of checkpoints."""
    config = MoECheckpointConfig()
    given = {f"moe_ckpt_{name}": getattr(config, name) for name in vars(config)}
    given |= {"moe_ckpt_strategy": "full", "load": None, "save": None, "save_interval": 2, "train_iters": 3}
    given |= {"exit_interval": None, "eval_interval": 2, "do_valid": False, "iteration": 0, "finetune": False}
    given |= {"no_load_optim": None}
    given |= {"consumed_train_samples": 0, "consumed_valid_samples": 0, "skipped_train_samples": 0, "seq_length": 8}
    given |= {"global_batch_size": 4, "micro_batch_size": 2, "overlap_param_gather": False, "broken_iteration": None}
    given |= {"cuda_graph_impl": "none", "align_param_gather": False, "log_params_norm": False, "no_save_optim": None}
    given |= {"distributed_timeout_seconds_after_init": None, "name_first": False, "lost_in": ""}
    given |= dict.fromkeys(("save_dgrads_interval", "save_wgrads_interval", "gpu_sniff_test_interval"))
    given |= {
        "check_weight_hash_across_dp_replicas_interval": None,
        "data_parallel_size": 1,
        "no_save_rng": None,
        "curr_iteration": 0,
        "num_floating_point_operations_so_far": 0,
    }
    return argparse.Namespace(**given | values)


def stand_in(args: argparse.Namespace, version: str = "0.19.2", reruns: tuple[int, ...] = ()) -> Any:
    """A loop with these arguments, whose passes run twice in the iterations of `reruns`."""
    calls: list[str] = []
    Optimizer.calls = calls

    def collective(name: str) -> None:
        if args.lost_in == name:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    graph_flags = {name: value for name, value in vars(args).items() if name.startswith("cuda_graph")}
    shared = {
        "collective": collective,
        "torch": torch,
        "calls": calls,
        "get_args": lambda: args,
        "FullCudaGraphWrapper": FullCudaGraphWrapper,
        "TECudaGraphHelper": ModulesOfEngine,
        # The flag, which the model keeps as it was given.
        "config_of": lambda args: SimpleNamespace(**graph_flags),
        "Optimizer": Optimizer,
        "args_reruns": reruns,
    }
    loop: Any = ModuleType("megatron.training.training")
    vars(loop).update(shared)
    exec(_LOOP, vars(loop))
    for seam in SEAMS[".".join(version.split(".")[:2])]:
        if seam.name in _ELSEWHERE:
            home = ModuleType(seam.home)
            vars(home).update(shared)
            exec(_ELSEWHERE[seam.name], vars(home))
            setattr(loop, seam.name, getattr(home, seam.name))
    return loop


class Manager:
    """Notes what the hooks call, among what the loop does.

    replays: the iterations that it has run again, on ranks that replay alone or not. found: where it resumes, from
    what it has recorded.
    """

    def __init__(
        self,
        calls: list[str],
        found: int = 0,
        replays: int = 0,
        *,
        alone: bool = False,
        communicator: Any = None,
        recorded: dict[str, Any] | None = None,
    ) -> None:
        self.calls, self.iteration, self._left = calls, found, replays
        self.replays_alone, self.communicator, self.process_groups = alone, communicator, "groups"
        self.loss, self.stall_s, self.repeats_steps = None, 0.0, replays > 0
        self._recorded = {"evaluated_iteration": found, "iteration": found} | (recorded or {})
        self.state: Any = None
        self.lost_tokens: tuple[int, ...] | None = None

    def lost_before(self, lost_tokens: Any) -> None:
        self.lost_tokens = lost_tokens

    def __call__(self, model: Any, optimizer: Any, scheduler: Any, config: Any, *, state: Any, **_sizes: Any) -> Any:
        self.state = state
        return self

    def resume(self, load: Any, newest: Loadable, *, run_again: Any = None) -> int:
        self.loads_in_part = newest.in_part
        if self.iteration:
            self.calls.append("resume")
            self.state.load_state_dict(self.state.state_dict() | self._recorded)
        elif load is not None:
            self.iteration = load()
        return self.iteration

    @contextmanager
    def run(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.calls.append(f"left with {type(error).__name__}")
            raise
        self.finish(keep_memory=False)

    @contextmanager
    def forward_backward(self) -> Iterator[None]:
        self.calls.append("(")
        yield
        self.calls.append(")")

    begins_snapshot = True

    @property
    def is_replaying(self) -> bool:
        return self._left > 0

    def after_step(self) -> None:
        self.calls.append("after_step")
        self._left -= self.is_replaying

    def step_done(self) -> None:
        self.iteration += 1
        self.calls.append("step_done")

    def finish(self, *, keep_memory: bool) -> None:
        self.calls.append("finish, memory kept" if keep_memory else "finish")

    def begin(self) -> None:
        self.calls.append("begin")

    def rejoin(self) -> bool:
        self.calls.append("rejoin")
        return False

    def reported(self) -> None:
        self.calls.append("reported")

    def saved(self) -> None:
        self.calls.append("saved")


@contextmanager
def one_rank() -> Iterator[None]:
    """Without any process group: one rank, whose device has random states."""
    from megatron.core import parallel_state

    with (
        mock.patch.object(parallel_state, "get_data_parallel_world_size", return_value=1),
        mock.patch.object(torch.distributed, "get_rank", return_value=0),
        mock.patch.object(torch.distributed, "get_world_size", return_value=1),
        mock.patch.object(torch.distributed, "broadcast_object_list"),
        mock.patch.object(torch.distributed, "all_gather_object", lambda found, own: found.__setitem__(0, own)),
        mock.patch.object(torch.distributed, "all_reduce"),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.cuda, "get_rng_state", torch.get_rng_state),
        mock.patch.object(torch.cuda, "set_rng_state", torch.set_rng_state),
    ):
        yield

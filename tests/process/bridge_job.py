"""One rank of a small GPT with experts, trained by Megatron-Bridge's loop with or without protection.

    bridge_job.py [--protected] [--iterations N] [--save FOLDER] [--leave-at N]

The model is that of examples/own_loop. The loop, its state, checkpoint manager, callbacks and the decision whether to
load are Bridge's own where its wheel is installed (`bridge_wheel`), else what `bridge_stand_in` says of them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

OWN_LOOP = Path(__file__).resolve().parents[2] / "examples" / "own_loop" / "train.py"
OPERATIONS = 1000


class Section(SimpleNamespace):
    """A part of Bridge's configuration; what is not said is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def configuration(given: argparse.Namespace, own: dict[str, Any]) -> Section:
    checkpoint = Section(save=given.save, load=given.save, save_interval=given.save_interval, ckpt_format="torch_dist")
    train = Section(
        train_iters=given.iterations, global_batch_size=own["SAMPLES"], micro_batch_size=1, iterations_to_skip=[],
        empty_unused_memory_level=0, exit_interval=given.leave_at,
    )  # fmt: skip
    return Section(
        train=train, checkpoint=checkpoint, validation=Section(), model=Section(seq_length=own["TOKENS"]),
        ddp=Section(use_distributed_optimizer=True), optimizer=Section(use_distributed_optimizer=True),
        dist=Section(), dataset=Section(dataloader_type="single"), data_parallel_size=2, operations=OPERATIONS,
        logger=Section(skip_train_metrics_log=True, timing_log_level=0, timing_log_option="max"),
    )  # fmt: skip


def samples(own: dict[str, Any], consumed: int) -> Iterator[torch.Tensor]:
    """From where training stands; a seed is drawn first, as a data loader's iterator draws one."""
    torch.randint(2**31, ())
    for iteration in itertools.count(consumed // own["SAMPLES"] + 1):
        yield from own["samples_of"](iteration)


def report(iteration: int, losses: Any, norm: float | None) -> None:
    loss = sum((float(part["loss"]) for part in losses), 0.0)
    print(
        f"rank {os.environ['RANK']} iteration {iteration}: loss {loss.hex()} norm {float(norm or 0).hex()}", flush=True
    )


def pretrain(config: Section, forward_step_func: Any, own: dict[str, Any], bridge: Any) -> None:
    """As training/pretrain.py:110 and training/setup.py:200 of Bridge 0.6.2, with what takes part in checkpointing."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    model, optimizer, scheduler = own["model"], own["optimizer"], own["scheduler"]
    ranks = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(0, None, config.train.global_batch_size, 1, ranks)
    state, manager = bridge.state(config), bridge.manager(config.checkpoint)  # setup.py:285
    if bridge.should_load(config, manager):  # setup.py:397
        manager.load(bridge.load_context(state, [model], optimizer, scheduler))  # setup.py:408
    iterator = samples(own, state.train_state.consumed_train_samples)
    first = next(iterator)
    bridge.train(forward_step_func, [model], optimizer, scheduler, itertools.chain([first], iterator), state, manager)
    # Behind the last evaluations (`_finish_train`, pretrain.py:197).
    manager.finalize_async_saves(state=state, blocking=True, terminate=True)
    print(f"rank {os.environ['RANK']} counted {bridge.counted(state)}", flush=True)
    torch.distributed.destroy_process_group()


class StandIn:
    """What `pretrain` takes of Bridge, where it is not installed."""

    def __init__(self) -> None:
        import bridge_stand_in as there

        there.install()
        self.state, self.should_load, self.load_context = (
            there.GlobalState, there.should_load_checkpoint, there.CheckpointContext,
        )  # fmt: skip
        self._train = there.train

    def manager(self, checkpoint: Section) -> Any:
        from bridge_stand_in import DefaultCheckpointManager

        from megatron.core.dist_checkpointing.moe.bridge import BridgeCheckpointManager

        return (BridgeCheckpointManager if checkpoint.custom_manager_class else DefaultCheckpointManager)(checkpoint)

    def train(self, forward_step: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any) -> None:
        self._train(forward_step, model, optimizer, scheduler, *rest, report)

    @staticmethod
    def counted(state: Any) -> str:
        return str(sorted(vars(state.train_state).items()))


class Wheel:
    """The same of the wheel: its own loop."""

    def __init__(self) -> None:
        import bridge_wheel

        bridge_wheel.prepare()
        from bridge_stand_in import load_dense, save_dense

        from megatron.bridge.training import callbacks, checkpointing, setup, state, train

        self._train_module, self._callbacks, self._state = train, callbacks, state
        self.manager, self.should_load = checkpointing.create_checkpoint_manager, vars(setup)["_should_load_checkpoint"]
        self.load_context = checkpointing.CheckpointLoadContext

        def save(state: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, **_: Any) -> None:
            save_dense(state, model, optimizer, opt_param_scheduler)
            if torch.distributed.get_rank() == 0:
                tracker = checkpointing.get_checkpoint_train_state_filename(state.cfg.checkpoint.save, "latest")
                torch.save(state.train_state.state_dict(), tracker)
            torch.distributed.barrier()

        def load(state: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, **_: Any) -> tuple[int, int]:
            tracker = checkpointing.get_checkpoint_train_state_filename(state.cfg.checkpoint.load, "latest")
            state.train_state = checkpointing.read_train_state(tracker)
            load_dense(state, model, optimizer, opt_param_scheduler)
            return state.train_state.step, state.train_state.floating_point_operations_so_far

        # Dense checkpoints of models need Bridge's models; which one is loaded, and when, is decided by Bridge.
        checkpointing.save_checkpoint, checkpointing.load_checkpoint = save, load

    def state(self, config: Section) -> Any:
        made = self._state.GlobalState()
        made.cfg = config
        return made

    def train(
        self, forward_step: Any, model: Any, optimizer: Any, scheduler: Any, samples: Any, state: Any, manager: Any
    ) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

        initialize_rerun_state_machine(mode=RerunMode.DISABLED)
        loop, callbacks = self._train_module, self._callbacks.CallbackManager()

        def step_ended(context: Any) -> None:
            report(
                context.state.train_state.step + 1, [context.loss_dict] if context.loss_dict else [], context.grad_norm
            )

        callbacks.register("on_train_step_end", step_ended)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        with (  # what reads Bridge's models
            mock.patch.object(loop, "get_tensor_shapes_adjust_fn_for_distillation", return_value=None),
            mock.patch.object(loop.flop_utils, "num_floating_point_operations", return_value=OPERATIONS),
            mock.patch.object(loop.flop_utils, "resolve_global_flops_runtime_stats", return_value=(0,) * 5),
        ):
            loop.train(
                forward_step, model, optimizer, scheduler, samples, None, state, manager, groups,
                callback_manager=callbacks,
            )  # fmt: skip

    @staticmethod
    def counted(state: Any) -> str:
        names = (
            "consumed_train_samples", "consumed_valid_samples", "floating_point_operations_so_far",
            "skipped_train_samples", "step",
        )  # fmt: skip
        return str([(name, int(getattr(state.train_state, name))) for name in names])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--protected", action="store_true")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--leave-at", type=int)
    parser.add_argument("--save")
    parser.add_argument("--save-interval", type=int, default=5)
    given = parser.parse_args(sys.argv[1:])
    own = runpy.run_path(str(OWN_LOOP), run_name="own_loop")  # builds the model, on the CPU where there is no GPU
    import bridge_wheel

    bridge = StandIn() if bridge_wheel.why_not() else Wheel()
    config, run = configuration(given, own), pretrain
    if given.protected:
        from megatron.core.dist_checkpointing.moe import bridge as adapter

        run = adapter.protected(pretrain)
    elif "MOE_CKPT_FLAGS" in os.environ:
        name = "megatron.core.dist_checkpointing.moe.bridge.BridgeCheckpointManager"
        config.checkpoint.custom_manager_class = name
    run(config, own["forward_step"], own, bridge)


if __name__ == "__main__":
    main()

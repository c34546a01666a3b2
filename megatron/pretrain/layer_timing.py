"""Times Megatron-Core's own layers in a small job, and how that comes back: what `moe-ckpt profile` starts.

    LAYER_TIMING=settings.json python -m megatron.pretrain.launch --nproc-per-node N --max-restarts 1 \\
        megatron/pretrain/layer_timing.py FLAGS OF MEGATRON-LM

The job has as many layers per pipeline stage as a pattern says, and Megatron-LM builds it as for its training loop:
layers of Megatron-Core under DistributedDataParallel, its optimizer, its pipeline schedules. All ranks compute at once,
as in training, so what they take from each other on one machine is in the figures. At last one rank is killed, and what
the launcher starts then notes when it could train.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import megatron.pretrain.core_import  # noqa: F401  # before all that imports Megatron-Core
from megatron.core.dist_checkpointing.moe.boot_clock import since_boot_s
from megatron.core.dist_checkpointing.moe.storage.manifest import checksum
from megatron.pretrain.device import device_of
from megatron.pretrain.initialize import Launch
from megatron.pretrain.loop import in_worker, start_megatron

SETTINGS = "LAYER_TIMING"
"""Environment variable with the file of the settings."""

FEW, MANY = 1, 3
"""Microbatches of the two passes whose difference is what one more takes."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to time. patterns: layers of a stage, 1 with experts and 0 without. micro_batch_sizes: ascending. repeats:
    of each, of which the median counts. copied_bytes: of the block that is copied to the host beside training. result,
    killed, back: files for what was found, and for when a rank was killed and all trained again; progress: one that
    gets a character after each row."""

    patterns: tuple[tuple[int, ...], ...]
    micro_batch_sizes: tuple[int, ...]
    repeats: int
    copied_bytes: int
    result: str
    progress: str
    killed: str
    back: str

    @staticmethod
    def read(path: Path) -> Settings:
        """As `moe-ckpt profile` wrote them."""
        values = json.loads(path.read_text())
        values["patterns"] = tuple(map(tuple, values["patterns"]))
        return Settings(**values | {"micro_batch_sizes": tuple(values["micro_batch_sizes"])})


def main(argv: Sequence[str]) -> int:
    """Exit code, see `pretrain_gpt_moe.train`."""
    return in_worker(argv, partial(time_layers, device_of(argv), Settings.read(Path(os.environ[SETTINGS]))))


def time_layers(device: str, settings: Settings, launch: Launch) -> None:
    """Time all patterns and lose a rank; after the restart only note when training goes at its pace.

    Args:
        device: `cpu` or `cuda`.
        settings: The patterns to time, and where results go.
        launch: The place of this process in the job.
    """
    start_megatron(device, launch)
    is_back = launch.attempt > 0
    found: dict[str, Any] = {"ready_at_s": back_at_s(settings)} if is_back else _timed(settings)
    if launch.rank == 0:
        Path(settings.back if is_back else settings.result).write_text(json.dumps(found))
    if not is_back:
        _lose_a_rank(launch, settings)


def back_at_s(settings: Settings) -> float:
    """When the last rank of a restarted job had built everything, by `boot_clock`; what its first iteration
    takes longer than the next one is added."""
    job = TimedJob(settings.patterns[0])
    built_at_s = _slowest(since_boot_s())
    first_s, next_s = (job.iteration_s(settings.micro_batch_sizes[-1]) for _ in range(2))
    return built_at_s + max(0.0, first_s - next_s)


def _lose_a_rank(launch: Launch, settings: Settings) -> None:
    """The last one, by SIGKILL, while the others wait for it in a collective, as in training."""
    import torch

    torch.distributed.barrier()
    if launch.rank == launch.world_size - 1:
        Path(settings.killed).write_text(json.dumps({"at_s": since_boot_s()}))
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def _timed(settings: Settings) -> dict[str, Any]:
    """Rows for each pattern and size, the largest also with frozen layers; and copies beside training."""
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"rows": rows}
    for pattern in settings.patterns:
        job = TimedJob(pattern)
        for size in settings.micro_batch_sizes:
            rows.append({"layers": pattern} | job.measured(size, settings.repeats))
            _advance(settings)
        rows[-1]["frozen_s"] = job.frozen_s(settings.micro_batch_sizes[-1], settings.repeats)
        _advance(settings)
        if pattern == settings.patterns[-1]:
            found["copies"] = job.beside_copies(settings)
    return found


def _advance(settings: Settings) -> None:
    if Launch.from_environment().rank == 0:
        with Path(settings.progress).open("a") as file:
            file.write(".")


class TimedJob:
    """One training job with these layers in each stage, built by Megatron-LM, with batches of chance: tokens are as
    frequent as in text, by Zipf's law, so that experts have unequal loads."""

    def __init__(self, pattern: Sequence[int]) -> None:
        import torch

        from megatron.core.distributed import finalize_model_grads
        from megatron.core.enums import ModelType
        from megatron.core.utils import get_model_config
        from megatron.training import get_args
        from megatron.training.training import setup_model_and_optimizer
        from pretrain_gpt_moe import model_provider

        self._torch, self._args = torch, get_args()
        layers = [*pattern] * self._args.pipeline_model_parallel_size
        self._args.num_layers, self._args.moe_layer_freq = len(layers), layers
        self._chunks, self._optimizer, _ = setup_model_and_optimizer(
            model_provider_func=model_provider, model_type=ModelType.encoder_or_decoder
        )
        self._frequencies = 1 / torch.arange(1, self._args.vocab_size + 1)
        transformer = get_model_config(self._chunks[0])
        transformer.grad_scale_func = self._optimizer.scale_loss
        transformer.finalize_model_grads_func = finalize_model_grads
        for chunk in self._chunks:
            chunk.train()

    def measured(self, size: int, repeats: int) -> dict[str, Any]:
        """Times and memory with microbatches of a size.

        Args:
            size: Samples of a microbatch.
            repeats: How often each time is taken; the median counts.

        Returns:
            Seconds of one more microbatch, of the fewest, and of the optimizer's step; bytes at peak.
        """
        for count in (FEW, MANY):
            self.passes(size, count)
        few, many, steps = [], [], []
        for _ in range(repeats):
            few.append(_slowest(self.passes(size, FEW)))
            many.append(_slowest(self.passes(size, MANY)))
            steps.append(_slowest(self._clocked(self._optimizer.step)))
        return {
            "micro_batch_size": size,
            "microbatch_s": (statistics.median(many) - statistics.median(few)) / (MANY - FEW),
            "fewest_s": statistics.median(few),
            "step_s": statistics.median(steps),
            "parameters": int(_slowest(sum(p.numel() for chunk in self._chunks for p in chunk.parameters()))),
            "memory_bytes": int(_slowest(self._peak_bytes())),
        }

    def frozen_s(self, size: int, repeats: int) -> float:
        """Seconds of one more microbatch while no layer has weight gradients.

        Args:
            size: Samples of a microbatch.
            repeats: How often each time is taken; the median counts.
        """
        decoders = [one for chunk in self._chunks for one in chunk.modules() if _is_decoder(one)]
        for decoder in decoders:
            decoder.requires_grad_(False)
        found = self.measured(size, repeats)["microbatch_s"]
        for decoder in decoders:
            decoder.requires_grad_(True)
        return float(found)

    def beside_copies(self, settings: Settings) -> dict[str, float]:
        """Seconds of a pass by itself and beside copies to the host without a pause, and bytes of these; in turns."""
        size, alone, beside, copied = settings.micro_batch_sizes[-1], [], [], []
        for _ in range(settings.repeats):
            alone.append(_slowest(self.passes(size, MANY)))
            with _copying(self._torch, settings.copied_bytes) as count:
                beside.append(_slowest(self.passes(size, MANY)))
            copied.append(count[0] * settings.copied_bytes)
        return {
            "alone_s": statistics.median(alone),
            "beside_s": statistics.median(beside),
            "copied_bytes": statistics.median(copied),
        }

    def iteration_s(self, size: int) -> float:
        """Seconds of an iteration of the fewest microbatches, on the slowest rank: a collective."""
        return _slowest(self.passes(size, FEW) + self._clocked(self._optimizer.step))

    def passes(self, size: int, count: int) -> float:
        """Seconds of forward and backward, with the reduction of gradients.

        Args:
            size: Samples of a microbatch.
            count: The number of microbatches.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from pretrain_gpt_moe import forward_step

        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        batches = iter([self._batch(size) for _ in range(count)])
        return self._clocked(
            lambda: get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=self._chunks,
                num_microbatches=count,
                seq_length=self._args.seq_length,
                micro_batch_size=size,
                forward_only=False,
            )
        )

    def _batch(self, size: int) -> dict[str, Any]:
        torch, length = self._torch, self._args.seq_length
        tokens = torch.multinomial(self._frequencies, size * length, replacement=True).view(size, length)
        positions = torch.arange(length).expand(size, length)
        mask = torch.ones(size, length)
        return {"tokens": tokens, "labels": tokens, "position_ids": positions, "loss_mask": mask}

    def _clocked(self, work: Any) -> float:
        self._wait()
        self._torch.distributed.barrier()
        begun_s = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - begun_s

    def _wait(self) -> None:
        if self._args.device == "cuda":
            self._torch.cuda.synchronize()

    def _peak_bytes(self) -> int:
        """Of the GPU, or of this process."""
        if self._args.device == "cuda":
            return int(self._torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _is_decoder(module: Any) -> bool:
    from megatron.core.transformer.transformer_block import TransformerBlock

    return isinstance(module, TransformerBlock)


@contextmanager
def _copying(torch: Any, nbytes: int) -> Iterator[list[int]]:
    """A block beside which this rank copies to host memory without a pause, and checksums what it copied, as it would a
    snapshot; yielded is the number of copies."""
    on_gpu = torch.cuda.is_initialized()
    source = torch.ones(nbytes, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    target = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
    ended, count = threading.Event(), [0]

    def copy() -> None:
        stream = torch.cuda.Stream() if on_gpu else None
        while not ended.is_set():
            if stream is None:
                target.copy_(source)
            else:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
                stream.synchronize()
            checksum(memoryview(target.numpy()))
            count[0] += 1

    thread = threading.Thread(target=copy, name="copies")
    thread.start()
    try:
        yield count
    finally:
        ended.set()
        thread.join(timeout=60)


def _slowest(value: float) -> float:
    """The highest of all ranks: a collective."""
    import torch

    found = torch.tensor([float(value)], dtype=torch.float64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return float(found.item())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

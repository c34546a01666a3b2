"""How the driver imports Megatron-Core: torch's compiler comes in when a function is to be compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.pretrain.core_import import compiled_at_first_call
from megatron.pretrain.warm_up import asks_for_null_tokenizer

IMPORTED = """
import gc, sys, megatron.pretrain.core_import
print("megatron.core.transformer" in sys.modules, "torch._inductor.compile_fx" in sys.modules, gc.isenabled())
import torch
from megatron.core.jit import jit_fuser
print(torch.compile.__module__, jit_fuser(lambda: 1).__name__)
"""


def test_the_compiler_is_not_imported_with_megatron_core_and_is_there_for_all_others() -> None:
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == ["True", "False", "True", "torch", "<lambda>"]


TIMERS = """
import sys, types, megatron.pretrain.core_import
print("wandb" in sys.modules)
from megatron.core.timers import Timers
class Wandb(types.ModuleType):
    log = staticmethod(lambda values, iteration: print(sorted(values), iteration))
writer = sys.modules["wandb"] = Wandb("wandb")  # as the job imports it when `--wandb-project` is given
timers = Timers(2, "max")
timers._get_global_min_max_time = lambda names, *_: {name: (0.1, 0.2) for name in names}
timers.write(["forward"], writer, 7)
timers.write(["forward"], Wandb("another"), 8)
"""


def test_timers_write_to_wandb_that_is_imported_when_the_job_asks_for_it() -> None:
    command = [sys.executable, "-W", "ignore", "-c", TIMERS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split("\n") == ["False", "['forward-time'] 7", ""]


WITHOUT_LOOP = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "megatron.training" else found(name, package)
import pretrain_gpt_moe
"""


def test_a_megatron_core_that_comes_without_the_training_loop_is_refused_in_a_line() -> None:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_LOOP]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "has no training loop beside it: there is no megatron.training; pip install" in line


@pytest.mark.parametrize(
    "start",
    ["import pretrain_gpt_moe", "import runpy; runpy.run_module('megatron.pretrain.launch', run_name='__main__')"],
)
def test_a_start_says_that_torch_is_missing_before_it_imports_it(start: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", f"import sys; sys.modules['torch'] = None; {start}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("torch is missing; 2.8 and newer are supported: pip install")


def test_functions_are_compiled_once_with_their_options_at_their_first_call() -> None:
    compiled: list[tuple[str, dict[str, Any]]] = []

    def compile_now(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled.append((function.__name__, options))
        return lambda *arguments: ("compiled", function(*arguments))

    torch = SimpleNamespace(compile=compile_now)
    with compiled_at_first_call(cast("Any", torch)):

        @torch.compile
        def plain(x: int) -> int:
            return x + 1

        @torch.compile(dynamic=True)
        def dynamic(x: int) -> int:
            """Doubles."""
            return 2 * x

        @torch.compile
        def on_the_cpu(x: int) -> int:
            return -x

    assert torch.compile is compile_now
    assert not compiled
    torch.compile = lambda function: function
    assert on_the_cpu(3) == -3
    torch.compile = compile_now
    assert (dynamic.__name__, dynamic.__doc__) == ("dynamic", "Doubles.")
    assert (plain(3), dynamic(3), plain(4)) == (("compiled", 4), ("compiled", 6), ("compiled", 5))
    assert compiled == [("plain", {}), ("dynamic", {"dynamic": True})]


FLAGS = """
import sys, pretrain_gpt_moe
pretrain_gpt_moe.main([*sys.argv[1:], "--no-such-flag"])
print(*(name in sys.modules for name in ("megatron.core.tokenizers.text", "transformers")))
"""


@pytest.mark.parametrize(
    ("kind", "imported"),
    [("NullTokenizer", "False"), pytest.param("HuggingFaceTokenizer", "True", marks=pytest.mark.ci)],
)
def test_a_start_imports_transformers_for_tokenizers_that_use_it(kind: str, imported: str) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "-W", "ignore", "-c", FLAGS, "--device", "cpu", "--tokenizer-type", kind]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == ["True", imported]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--tokenizer-type=NullTokenizer --vocab-size 257", True),
        ("--vocab-size 257", False),
        ("--tokenizer-type SFTTokenizer", False),
        ("--tokenizer-type NullTokenizer --use-checkpoint-args", False),
        ("--tokenizer-type NullTokenizer --yaml-cfg job.yaml", False),
        ("--tokenizer-type", False),
    ],
)
def test_only_flags_that_have_the_last_say_leave_transformers_out(flags: str, expected: bool) -> None:
    assert asks_for_null_tokenizer(flags.split()) == expected


def test_nothing_is_left_frozen_when_a_process_ends() -> None:
    """Bindings made with nanobind report whatever is: 25 lines of leaks per rank."""
    program = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count())); import megatron.pretrain.core_import"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == ["0"]

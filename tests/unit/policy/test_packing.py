"""How close windows by bytes come to the best of all partitions, found by brute force, for few operators."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from window_cases import WINDOWS, byte_aware_schedule, even_budget, is_even, named, scheduled, stalls

from megatron.core.dist_checkpointing.moe.policy.window import hard_count
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, OperatorSize, Topology, expert
from moe_ckpt.simulator.models import PRESETS
from moe_ckpt.simulator.paper_window import paper_schedule
from moe_ckpt.simulator.shards import owned_operators, shard_sizes

LAYOUTS = {
    "GPT-125M-8E": {"world_size": 16, "ep": 8},
    "GPT-350M-16E": {"world_size": 32, "ep": 8},
    "GPT2-MoE-Small": {"world_size": 8, "ep": 4},
    "MoE-LLaVa": {"world_size": 16, "ep": 4},
    "GPT-MoE": {"world_size": 96, "pp": 3, "ep": 8},
    "QWen-MoE": {"world_size": 96, "pp": 6, "ep": 4},
    "DeepSeek-MoE": {"world_size": 96, "pp": 12, "ep": 8},
    "DeepSeek-V3-671B": {"world_size": 2048, "pp": 16, "ep": 64},
    "Mixtral-8x7B": {"world_size": 64, "pp": 4, "ep": 8, "tp": 2},
    "Qwen3-30B-A3B": {"world_size": 64, "pp": 4, "ep": 8},
}


def fewest_steps(sizes: Sequence[OperatorSize], cap: int, limit: int) -> int | None:
    """Brute force over all partitions, equal operators taken together: the fewest steps of at most `cap` bytes."""
    kinds = sorted(Counter((size.full_bytes, size.weights_bytes) for size in sizes).items(), reverse=True)
    everything = tuple(count for _, count in kinds)
    reached = {(0,) * len(kinds)}
    seen = set(reached)
    for steps in range(1, limit + 1):
        last = reached
        reached = set()
        for placed in last:
            gap = cap - sum(count * weights for count, ((_, weights), _) in zip(placed, kinds, strict=True))
            reached |= set(_more(placed, kinds, gap)) - seen if gap >= 0 else set()
        if everything in reached:
            return steps
        seen |= reached
    return None


def _more(placed: tuple[int, ...], kinds: Sequence[tuple[tuple[int, int], int]], gap: int) -> Iterator[tuple[int, ...]]:
    if not placed:
        yield ()
        return
    (full, _), count = kinds[0]
    for taken in range(min(count - placed[0], gap // full) + 1):
        for rest in _more(placed[1:], kinds[1:], gap - taken * full):
            yield (placed[0] + taken, *rest)


def least_peak(sizes: Sequence[OperatorSize], window: int, known: int) -> int:
    """The smallest peak of any partition, within 0.1 %, by brute force; `known` is one that is possible."""
    low, high = sum(size.full_bytes for size in sizes) // window - 1, known
    while high - low > max(1, known // 1000):
        middle = (low + high) // 2
        if fewest_steps(sizes, middle, window):
            high = middle
        else:
            low = middle
    return high


@pytest.mark.parametrize(
    ("weights", "window", "pinned", "budget", "peak"),
    [
        pytest.param("15 9 9 13 9", 4, {}, 156, 111, id="in order rather than by size"),
        pytest.param("6 5 5 6 6 6 5", 7, {0: 5, 2: 2, 5: 5, 4: 4}, 167, 72, id="around weights of pinned operators"),
        pytest.param("14 13 6 13 14 6 6 14", 7, {6: 1, 4: 4, 5: 5, 3: 6}, 358, 139, id="something for each step"),
        pytest.param(
            "14 7 8 8 8 14 8 7 7", 9, {6: 5, 7: 5, 4: 7, 8: 5, 5: 7, 3: 4}, 134, 168, id="one above the budget"
        ),
    ],
)
def test_cases_that_need_every_rule_reach_the_best_known_peak(
    weights: str, window: int, pinned: dict[int, int], budget: int, peak: int
) -> None:
    sizes = named(*((6 * int(count), int(count)) for count in weights.split()))
    pins = {expert(0, index): step for index, step in pinned.items()}
    assert byte_aware_schedule(list(sizes), sizes, budget, window=window, pinned=pins).peak_bytes <= peak


def test_on_small_cases_the_window_and_its_peak_come_close_to_the_best_of_all_partitions() -> None:
    source, longer, ratios = random.Random(1), 0, []
    for _ in range(300):
        kinds = [(weights * 6, weights) for weights in source.choices(range(1, 60), k=source.randint(1, 3))]
        sizes = named(*(source.choice(kinds) for _ in range(source.randint(2, 12))))
        known = list(sizes.values())
        total = sum(size.full_bytes for size in known)
        schedule = scheduled(sizes, source.randint(total // 6, total))
        best = fewest_steps(known, schedule.budget_bytes, len(known))
        assert schedule.fits == (best is not None), "a window that fits was missed, or one was made up"
        if best is not None:
            longer += schedule.window.size - best
        ratios.append(schedule.peak_bytes / least_peak(known, schedule.window.size, schedule.peak_bytes))
    ratios.sort()
    assert longer <= 6
    assert ratios[150] == pytest.approx(1, abs=0.002)
    assert ratios[270] <= 1.03
    assert ratios[-1] <= 1.15


def test_counting_gets_a_smaller_window_than_bytes_only_where_it_stalls() -> None:
    shape, topology = PRESETS["DeepSeek-MoE"], Topology(**LAYOUTS["DeepSeek-MoE"])
    sizes = shard_sizes(shape, topology, FP16_FP32)
    order = hard_count(owned_operators(shape, topology)[4, 0], {})
    budget = even_budget(sizes, order, 10)
    counted, weighed = paper_schedule(order, sizes, budget), byte_aware_schedule(order, sizes, budget)
    assert counted.window.size < weighed.window.size
    assert sum(stalls(counted)) > budget // 2
    assert weighed.fits


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_copy_evenly_or_so_few_operators_that_no_partition_is_more_even(name: str) -> None:
    shape, topology = PRESETS[name], Topology(**LAYOUTS[name])
    sizes = shard_sizes(shape, topology, FP16_FP32)
    stages = {stage: operators for (stage, ep), operators in owned_operators(shape, topology).items() if ep == 0}
    by_sizes = {tuple(sizes[operator] for operator in operators): operators for operators in stages.values()}
    for operators in by_sizes.values():
        order = hard_count(operators, {})
        for budget in (even_budget(sizes, order, window) for window in WINDOWS if window <= len(order) // 2):
            schedule, counted = byte_aware_schedule(order, sizes, budget), paper_schedule(order, sizes, budget)
            assert schedule.window.size <= counted.window.size or (schedule.fits and not counted.fits)
            if not is_even(schedule, sizes):
                # Without its smallest operators the brute force ends in time, and only finds lower peaks.
                known = [sizes[operator] for operator in order]
                known = [size for size in known if size.full_bytes * 1000 > max(known, key=_full).full_bytes]
                best = least_peak(known, schedule.window.size, schedule.peak_bytes)
                assert schedule.peak_bytes <= 1.05 * best, (len(order), schedule.load_bytes, best)


def _full(size: OperatorSize) -> int:
    return size.full_bytes

"""MoEvement Table 6: host memory."""

from __future__ import annotations

import pytest

from reproduce import table6


def test_totals_are_within_seven_per_cent_of_all_published_ones() -> None:
    found = [one for one in table6.differences("total_bytes").values() if one is not None]
    assert len(found) == 3
    assert max(map(abs, found)) <= 0.07


def test_geminis_memory_is_within_three_per_cent() -> None:
    assert max(abs(one) for one in table6.differences("gemini_bytes").values() if one is not None) <= 0.03


@pytest.mark.parametrize("model", ["MoE-LLaVa", "GPT-MoE", "QWen-MoE", "DeepSeek-MoE"])
def test_sparse_checkpoints_and_logs_take_at_most_a_fifth_more_than_geminis(model: str) -> None:
    use = table6.memory()[model]
    assert 0 < use.total_bytes / use.gemini_bytes - 1 < 0.2


def test_the_longest_window_has_the_largest_increase() -> None:
    increase = {model: use.sparse_bytes / use.gemini_bytes for model, use in table6.memory().items()}
    assert max(increase, key=lambda model: increase[model]) == "DeepSeek-MoE"

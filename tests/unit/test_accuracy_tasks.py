"""Questions about held-out text, and what is made of their answers."""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "accuracy"))

import campaign  # noqa: E402
import fine_tuning  # noqa: E402
import tasks  # noqa: E402

WORDS = [f"word{one}" for one in "abcdefgh"] + [f"longer_{one}" for one in "abcdefgh"]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forty documents, of which each says its number; the last two are held out."""
    texts = [" ".join([f"document{number}", *WORDS, ""] * 30).encode() for number in range(40)]
    (tmp_path / "text.bin").write_bytes(b"".join(array("H", [*text, 256]).tobytes() for text in texts))
    found = SimpleNamespace(sequence_lengths=[len(text) + 1 for text in texts], token_dtype=SimpleNamespace(itemsize=2))
    monkeypatch.setattr(tasks, "open_corpus", lambda prefix: found)
    return str(tmp_path / "text")


def test_only_the_last_twentieth_is_asked_about(corpus: str) -> None:
    assert [text.split()[0] for text in tasks.held_out(corpus)] == [b"document38", b"document39"]


def test_a_right_word_is_among_others_of_its_length_and_the_same_text(corpus: str) -> None:
    found = [one for one in tasks.questions(corpus, 20, 64) if one.task == "cloze"]
    assert len(found) == 20
    document = b"".join(tasks.held_out(corpus))
    for one in found:
        assert len({len(text) for text in one.texts}) == 1
        assert len({text[: one.begin] for text in one.texts}) == 1
        assert len({text[one.begin :] for text in one.texts}) == 4
        assert one.texts[0] in document


def test_an_original_has_the_same_bytes_as_its_copy_in_another_order(corpus: str) -> None:
    for one in (one for one in tasks.questions(corpus, 20, 64) if one.task == "original"):
        first, second = one.texts
        assert sorted(first) == sorted(second)
        assert first != second
        assert first[: one.begin] == second[: one.begin]


def test_questions_are_the_same_for_every_model(corpus: str) -> None:
    assert tasks.questions(corpus, 5, 64) == tasks.questions(corpus, 5, 64)


def test_only_labels_of_the_answer_count(corpus: str) -> None:
    one = tasks.questions(corpus, 1, 64)[0]
    ids, masks = tasks.rows(one, 80)
    assert all(len(row) == 81 for row in ids)
    counted = bytes(token for token, counts in zip(ids[0][1:], masks[0], strict=True) if counts)
    assert counted == one.texts[0][one.begin :]


def test_an_answer_is_right_if_no_other_text_is_as_likely() -> None:
    assert tasks.right([1.0, 2.0, 3.0])
    assert not tasks.right([1.0, 1.0])
    assert not tasks.right([2.0, 1.0, 3.0])


def test_fine_tuning_makes_the_folder_of_its_results_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "new" / "results"
    monkeypatch.setattr(sys, "argv", ["fine_tuning.py", "--tiny", "--results", str(results)])
    monkeypatch.setattr(fine_tuning, "train", lambda *_, **__: sys.exit(f"results: {results.is_dir()}"))
    with pytest.raises(SystemExit, match="results: True"):
        fine_tuning.main()


def run(seed: int, name: str, loss: float, **changes: Any) -> dict[str, Any]:
    return {
        "seed": seed,
        "name": name,
        "loss": loss,
        "losses": f"{seed}",
        "repeated": True,
        "made": "commit abc",
    } | changes


def test_a_strategy_is_compared_with_the_fault_free_run_of_its_seed() -> None:
    runs = [run(1, "fault-free", 2.0), run(2, "fault-free", 4.0), run(1, "pec", 2.2), run(2, "pec", 4.0)]
    assert campaign.changes(runs, "pec", "loss") == pytest.approx([0.1, 0.0])
    assert campaign.interval([0.1, 0.0]) == "+5.00 ± 63.53"
    assert campaign.interval([0.1]) == "+10.00"


def test_the_page_says_which_losses_are_beyond_their_noise() -> None:
    reference = [run(seed, "fault-free", 2.0) for seed in (1, 2, 3)]
    clear = [run(seed, "pec K=1", loss) for seed, loss in ((1, 2.20), (2, 2.21), (3, 2.22))]
    noise = [run(seed, "selective", loss) for seed, loss in ((1, 1.9), (2, 2.0), (3, 2.1))]
    assert "no change is beyond its own interval" in campaign.resolved([*reference, *noise])
    told = campaign.resolved([*reference, *clear, *noise])
    assert "known to within 1.2 to 12.4 %; beyond its own interval is `pec K=1` (+10.50 ± 1.24 %)" in told
    assert campaign.resolved(reference) == ""


def test_controls_say_what_the_comparison_can_see() -> None:
    losses = {"fault-free": (2.0,) * 4, "one bit": (2.01, 1.99, 2.01, 2.0), "pec stale": (2.1, 2.11, 2.12, 2.1)}
    runs = [run(seed, name, found[seed]) for name, found in losses.items() for seed in range(4)]
    told = campaign.controlled(runs)
    assert "+0.12 ± 0.76 % off. So runs that lose nothing differ by 0.48 %" in told
    assert "an interval of ± 0.3 % takes 12 seeds, of which there are 4" in told
    assert "+5.38 ± 0.76 % off: the harm is seen" in told
    better = [one | {"loss": 4.0 - one["loss"]} for one in runs]
    assert "the harm is NOT seen" in campaign.controlled(better)
    assert campaign.controlled(runs[:8]) == ""


def test_a_null_control_that_is_the_fault_free_run_is_none() -> None:
    runs = [run(1, "fault-free", 2.0), run(1, "one bit", 2.0)]
    assert list(campaign.broken(runs)) == ["seed 1, one bit: the bit made no difference"]


def test_runs_of_a_page_are_not_made_again_and_a_seed_has_one_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"iterations": 16, "kills": list(campaign.TINY.kills), "runs": [run(1, "fault-free", 2.0)]}
    (tmp_path / "accuracy-campaign.json").write_text(json.dumps(data))
    assert list(campaign.published(tmp_path, campaign.TINY)) == [(1, "fault-free")]
    assert campaign.published(tmp_path, campaign.WHOLE) == {}
    asked = ["campaign.py", "--tiny", "--seeds", "1", "--only", "full", "--scratch", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*asked, "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="runs of seed 1 are of a release that was not recorded and of torch"):
        campaign.main()


def test_the_page_of_the_campaign_is_what_its_runs_say() -> None:
    data = json.loads((campaign.RESULTS / "accuracy-campaign.json").read_text())
    assert (data["iterations"], tuple(data["kills"])) == (campaign.WHOLE.iterations, campaign.WHOLE.kills)
    assert (campaign.RESULTS / "accuracy-campaign.md").read_text() == campaign.page(data["runs"], campaign.WHOLE)


def test_a_run_that_must_be_exact_and_is_not_is_named() -> None:
    runs = [run(1, "fault-free", 2.0), run(1, "full", 2.0), run(1, "sparse", 2.0, losses="other"), run(1, "pec", 3.0)]
    assert list(campaign.broken(runs)) == ["seed 1, sparse: the losses are not those of the fault-free run"]
    assert list(campaign.broken([runs[0], run(1, "full", 2.0, repeated=False)]))


def test_a_run_that_is_kept_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make(seed: int, name: str, scale: campaign.Scale, largest: int | None) -> dict[str, Any]:
        made.append(name)
        return run(seed, name, 1.0)

    monkeypatch.setattr(campaign, "made", make)
    first = campaign.kept(1, "full", campaign.TINY, tmp_path)
    assert campaign.kept(1, "full", campaign.TINY, tmp_path) == first
    assert made == ["full"]
    assert campaign.kept(1, "full", campaign.WHOLE, tmp_path)["seed"] == 1
    assert made == ["full", "full"]

"""Checkpoints with some of the experts: what they hold, what loading makes of them, and what stock makes of them."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempts import Cluster, recovered
from partial_hooks import full_disk, poisoned_before_load
from runs import Layout, Start, Train, differences, digest, exact, flags, reports_in
from world import Outcome, Running, World

from megatron.core.dist_checkpointing.moe.types import expert
from moe_ckpt.commands.main import main as moe_ckpt
from moe_ckpt.dense.chain import MANIFEST, Chain, encode, read_chain
from moe_ckpt.dense.dense import open_dense
from moe_ckpt.dense.integrity import check, seal

EXPERTS, RESUMED_AT, LAST = 4, 4, 6
SPREAD = Layout(pp=2, ep=2, ranks=4)
PLAIN = Layout(pp=1, ep=1, ranks=2)
ALONE = Layout(pp=1, ep=1, ranks=1)
SHARED = Layout(pp=1, ep=2, ranks=2)
BF16 = ["--bf16", "--dist-ckpt-optim-fully-reshardable"]
EACH = ["--save-interval", "1"]
PROTECTED = ["--moe-ckpt-strategy", "full"]
IN_TURN = [*PROTECTED, "--save-experts", "1"]
BESIDE = [*IN_TURN, "--async-save"]
WEIGHTS = [*IN_TURN, "--save-experts-scope", "weights"]
MOMENTS = [*IN_TURN, "--save-experts-scope", "optimizer"]
APART = ["--moe-layer-freq", "[0,1]"]
"""Experts in one of two layers: then core does not stack the tensors of layers."""


def called(*arguments: object) -> int:
    """The exit code of `moe-ckpt`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["moe-ckpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            moe_ckpt()
    return int(ended.value.code or 0)


def convert(source: Path, target: Path) -> int:
    """The exit code of `moe-ckpt convert`."""
    return called("convert", "--to", "dense", source, target)


def chain(folder: Path, iteration: int) -> Chain:
    found = read_chain(folder / f"iter_{iteration:07d}")
    assert found is not None
    return found


def expert_bytes(folder: Path, iteration: int, scope: str = "both") -> int:
    """Bytes in the files that belong to experts, or to what a scope names of them."""
    tensors = open_dense(folder / f"iter_{iteration:07d}").tensors.items()
    of_experts = [info for name, info in tensors if ".experts." in name and is_named(scope, name)]
    return sum(chunk.extent.length_bytes for info in of_experts for chunk in info.chunks)


def is_named(scope: str, name: str) -> bool:
    """Whether a tensor is among what the scope leaves out of experts."""
    return scope == "both" or (".exp_avg" in name) == (scope == "optimizer")


Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The directory of a run with a checkpoint after each iteration; each is made once."""
    made: dict[object, Path] = {}

    def run(layout: Layout, *extra: str, distributed: bool = True) -> Path:
        if (layout, extra) not in made:
            folder = tmp_path_factory.mktemp("saved")
            length = [] if "--save-experts" in extra else ["--exit-interval", str(RESUMED_AT)]
            saving = [*PROTECTED, *EACH, *length, "--save", str(folder)]
            argv = flags(corpus, layout, *BF16, *extra, *saving, distributed=distributed)
            outcome = world.run(argv, layout.ranks)
            assert set(outcome.codes) == {0}, outcome.said
            assert outcome.warnings == []
            made[layout, extra] = folder
        return made[layout, extra]

    return run


@pytest.fixture(scope="module")
def live(saved: Saved, world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """What loading the partial checkpoints makes of them, as a complete checkpoint, and what was said."""
    folder = tmp_path_factory.mktemp("live")
    # Iteration 6 is the last one: training ends before it begins, and saves what it has.
    loading = ["--load", str(saved(SPREAD, *BESIDE)), "--save", str(folder), "--ckpt-fully-parallel-load"]
    outcome = world.run(flags(corpus, SPREAD, *BF16, *PROTECTED, *loading), SPREAD.ranks, [poisoned_before_load])
    assert set(outcome.codes) == {0}, outcome.said
    return folder, outcome


@pytest.fixture
def start(start: Start, tmp_path: Path) -> Start:
    """As elsewhere, with memory of its own for each test: what is left there by a job that failed is another job's."""

    (tmp_path / "memory").mkdir()

    def start_job(layout: Layout, *extra: object, **options: Any) -> Running:
        memory = ("--moe-ckpt-memory-dir", tmp_path / "memory") if "--moe-ckpt-strategy" in extra else ()
        return start(layout, *memory, *extra, **options)

    return start_job


@pytest.fixture
def copied(saved: Saved, save: Path) -> Path:
    """A copy of the partial checkpoints to change."""
    shutil.copytree(saved(SPREAD, *BESIDE), save)
    return save


def with_stale_experts(whole: Path, holders: Chain, folder: Path) -> None:
    """Copy the newest complete iteration and overwrite what is stale with the bytes of older complete iterations."""
    newest = folder / f"iter_{holders.iteration:07d}"
    shutil.copytree(whole / newest.name, newest)
    old = {iteration: open_dense(whole / f"iter_{iteration:07d}") for iteration in holders.iterations}
    for name, info in open_dense(newest).tensors.items():
        for chunk in info.chunks if ".experts." in name and is_named(holders.scope, name) else ():
            apart = re.search(r"layers\.(\d+)\.", name)
            layer, index = (int(apart[1]), chunk.offsets[0]) if apart else chunk.offsets[:2]
            source = old[holders.holders[layer][index]]
            (stale,) = (one for one in source.tensors[name].chunks if one.offsets == chunk.offsets)
            assert stale.extent.length_bytes == chunk.extent.length_bytes
            with (source.directory / stale.extent.file).open("rb") as file:
                file.seek(stale.extent.offset_bytes)
                content = file.read(stale.extent.length_bytes)
            with (newest / chunk.extent.file).open("rb+") as file:
                file.seek(chunk.extent.offset_bytes)
                file.write(content)
    seal(newest)


ALL_STALE = ["model weights", "master weights", "exp_avg", "exp_avg_sq"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "model", "way", "distributed", "stale"),
    [
        pytest.param(SPREAD, [], BESIDE, True, ALL_STALE, id="spread", marks=pytest.mark.full),
        pytest.param(PLAIN, [], IN_TURN, True, ALL_STALE, id="plain", marks=pytest.mark.full),
        pytest.param(ALONE, APART, IN_TURN, False, ALL_STALE, id="replicated optimizer"),
        pytest.param(ALONE, [], WEIGHTS, True, ALL_STALE[:2], id="weights", marks=pytest.mark.full),
        pytest.param(PLAIN, [], MOMENTS, True, ALL_STALE[2:], id="moments", marks=pytest.mark.full),
        pytest.param(ALONE, APART, MOMENTS, False, ALL_STALE[2:], id="replicated moments", marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_continues_as_if_the_stale_experts_had_been_put_in_by_hand(
    layout: Layout,
    model: list[str],
    way: list[str],
    distributed: bool,
    stale: list[str],
    saved: Saved,
    train: Train,
    tmp_path: Path,
) -> None:
    whole = saved(layout, *model, distributed=distributed)
    parts = saved(layout, *model, *way, distributed=distributed)
    by_hand, merged, expected = tmp_path / "by-hand", tmp_path / "merged", tmp_path / "expected"
    with_stale_experts(whole, chain(parts, RESUMED_AT), by_hand)
    assert differences(digest(whole, RESUMED_AT), digest(by_hand, RESUMED_AT)) == stale
    for loaded, kept in ((by_hand, expected), (parts, merged)):
        loading = ["--load", loaded, "--ckpt-step", RESUMED_AT, "--save", kept, "--metrics-jsonl", kept / "reports"]
        hooks = [poisoned_before_load]
        train(layout, *BF16, *model, *IN_TURN, *loading, hooks=hooks, distributed=distributed)
    assert list(exact(merged / "reports")) == [5, 6]
    assert exact(merged / "reports") == exact(expected / "reports")
    # The first checkpoint in another directory holds all experts.
    assert chain(merged, LAST).is_complete
    assert differences(digest(expected, LAST), digest(merged, LAST)) == []


@pytest.mark.ci
def test_the_first_checkpoint_is_complete_and_the_others_hold_their_share_of_the_bytes_of_experts(saved: Saved) -> None:
    whole, parts = saved(SPREAD), saved(SPREAD, *BESIDE)
    assert differences(digest(whole, 1), digest(parts, 1)) == []
    for iteration in range(2, RESUMED_AT + 1):
        share = expert_bytes(parts, iteration) / expert_bytes(whole, iteration)
        assert share == pytest.approx(1 / EXPERTS, rel=0.02)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("way", "scope"), [(WEIGHTS, "weights"), pytest.param(MOMENTS, "optimizer", marks=pytest.mark.full)]
)
def test_a_scope_leaves_out_the_bytes_of_what_it_names(saved: Saved, way: list[str], scope: str) -> None:
    whole, parts = saved(ALONE), saved(ALONE, *way)
    for iteration in range(2, RESUMED_AT + 1):
        left_out = expert_bytes(whole, iteration, scope) * (1 - 1 / EXPERTS)
        assert expert_bytes(parts, iteration, scope) == pytest.approx(left_out / (EXPERTS - 1), rel=0.02)
        assert expert_bytes(parts, iteration) == pytest.approx(expert_bytes(whole, iteration) - left_out, rel=0.02)


@pytest.mark.ci
def test_by_load_the_experts_with_the_most_tokens_of_each_layer_are_saved(
    train: Train, save: Path, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    saving = [*EACH, *IN_TURN, "--save-experts-selection", "load-aware", "--save", save, "--metrics-jsonl", metrics]
    counting = ["--moe-ckpt-strategy", "pec", "--moe-ckpt-log-expert-tokens"]
    train(SHARED, *BF16, *saving, *counting)
    tokens = {int(at): rows for report in reports_in(metrics) for at, rows in (report["expert_tokens"] or {}).items()}
    assert set(tokens) >= set(range(1, LAST))
    unsaved = [[0] * EXPERTS for _ in range(2)]
    for iteration in range(2, LAST):
        for row, new in zip(unsaved, tokens[iteration], strict=True):
            row[:] = map(sum, zip(row, new, strict=True))
        last = unsaved[1].index(max(unsaved[1]))
        # Each of the two ranks has room for one of the two experts, and the last layer comes first.
        others = [at for at in range(EXPERTS) if at // 2 != last // 2]
        first = max(others, key=lambda at: (unsaved[0][at], -at))
        unsaved[0][first] = unsaved[1][last] = 0
        found = chain(save, iteration)
        assert found.held_by(iteration) == (expert(0, first), expert(1, last))
        assert found.unsaved == dict(enumerate(map(tuple, unsaved)))


def test_each_expert_is_saved_in_its_turn_and_its_layers_do_not_all_load_the_same_rank(saved: Saved) -> None:
    parts = saved(SPREAD, *BESIDE)
    chains = [chain(parts, iteration) for iteration in range(1, LAST + 1)]
    assert [one.is_complete for one in chains] == [True, *[False] * 5]
    for one in chains[4:]:
        assert all(sorted(row) == list(range(one.iteration - 3, one.iteration + 1)) for row in one.holders.values())
    assert [one.position for one in chains] == [0, 1, 2, 3, 0, 1]


def test_loading_says_for_each_layer_how_stale_its_experts_are(live: tuple[Path, Outcome]) -> None:
    _, outcome = live
    lines = [line for line in outcome.lines if "experts" in line and "behind" in line]
    assert len(lines) == 2
    assert all("of iteration 3, 3 behind" in line and "of iteration 6;" in line for line in lines)


@pytest.mark.ci
def test_a_resumed_run_continues_with_the_rotation(saved: Saved, train: Train, save: Path) -> None:
    train(ALONE, *BF16, *EACH, *IN_TURN, "--save", save, "--exit-interval", 3)
    resumed = ["--save", save, "--load", save, "--exit-interval", 5]
    train(ALONE, *BF16, *EACH, *IN_TURN, *resumed)
    unbroken = chain(saved(ALONE, *IN_TURN), 5)
    assert chain(save, 5).holders == unbroken.holders
    assert chain(save, 5).position == unbroken.position


@pytest.mark.ci
def test_an_older_snapshot_of_all_state_is_restored_and_no_newer_checkpoint_with_stale_experts(
    cluster: Cluster, train: Train, save: Path, tmp_path: Path
) -> None:
    saving = [*EACH, *IN_TURN, "--moe-ckpt-interval", 2, "--save", save, "--load", save]
    fault = ["--moe-ckpt-inject-fault", "0@4:start", "--metrics-jsonl", tmp_path / "struck"]
    complete: list[bool] = []
    outcomes = cluster.run(
        ALONE, *BF16, *saving, *fault, between=lambda _: complete.append(chain(save, 3).is_complete)
    )  # fmt: skip
    assert complete == [False]
    assert recovered(outcomes[1])[0] == "recovered iteration 2 exactly"
    train(ALONE, *BF16, "--metrics-jsonl", tmp_path / "unbroken")
    struck, unbroken = (
        {one["iteration"]: (one["lm_loss"], one["grad_norm"]) for one in reports_in(tmp_path / name)}
        for name in ("struck", "unbroken")
    )
    assert struck == unbroken


def test_a_digest_of_some_of_the_experts_is_refused(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("digest", saved(SPREAD, *BESIDE) / "iter_0000006") == 2
    assert "has some of the experts" in capsys.readouterr().err


def test_a_merged_export_is_what_loading_makes_of_the_chain_and_stock_loads_it(
    saved: Saved, live: tuple[Path, Outcome], train: Train, tmp_path: Path
) -> None:
    exported, stock = tmp_path / "exported", tmp_path / "stock"
    assert convert(saved(SPREAD, *BESIDE), exported) == 0
    assert check(exported / f"iter_{LAST:07d}") == ()
    train(SPREAD, *BF16, "--load", exported, "--save", stock)
    assert differences(digest(live[0], LAST), digest(exported, LAST)) == []
    assert differences(digest(live[0], LAST), digest(stock, LAST)) == []


@pytest.mark.full
def test_training_continues_from_a_converted_chain_as_from_the_chain_itself(
    saved: Saved, train: Train, tmp_path: Path
) -> None:
    parts, converted = saved(PLAIN, *IN_TURN), tmp_path / "converted"
    assert convert(parts / f"iter_{RESUMED_AT:07d}", converted) == 0
    sources = {"chain": ("--load", parts, "--ckpt-step", RESUMED_AT), "merged": ("--load", converted)}
    for name, loading in sources.items():
        reports = ["--metrics-jsonl", tmp_path / name]
        train(PLAIN, *BF16, *PROTECTED, *loading, *reports, hooks=[poisoned_before_load])
    assert list(exact(tmp_path / "chain")) == [5, 6]
    assert exact(tmp_path / "merged") == exact(tmp_path / "chain")


def test_a_chain_with_a_changed_byte_is_not_converted(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(copied)
    assert convert(copied, tmp_path / "converted") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "iter_0000003/__3_0.distcp is damaged: its checksum is" in line
    assert not (tmp_path / "converted").exists()


@pytest.mark.ci
def test_what_cannot_be_merged_is_refused_in_one_line(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = saved(SPREAD, *BESIDE)
    (tmp_path / "iter_0000006").mkdir()
    for source, reason in (
        (parts, "exists already"),
        (saved(SPREAD), "saved whole"),
        (tmp_path / "no", "does not exist"),
    ):
        assert convert(source, tmp_path) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000006"]


def test_a_partial_iteration_has_no_tensor_of_experts_under_the_name_that_stock_asks_for(saved: Saved) -> None:
    whole = open_dense(saved(SPREAD) / "iter_0000002").tensors
    part = open_dense(saved(SPREAD, *BESIDE) / "iter_0000002").tensors
    assert {name for name in whole if name not in part} == {name for name in whole if ".experts." in name}


@pytest.mark.ci
def test_a_chain_loads_under_another_layout(
    saved: Saved, live: tuple[Path, Outcome], train: Train, tmp_path: Path
) -> None:
    # As many samples in an iteration, and as large a vocabulary, as two data-parallel ranks have by default.
    layout, same = Layout(tp=2, pp=1, ep=2), ["--global-batch-size", 6, "--make-vocab-size-divisible-by", 192]
    loading = [*PROTECTED, "--load", saved(SPREAD, *BESIDE), "--save", tmp_path, "--no-load-rng", *same]
    train(layout, *BF16, *loading, hooks=[poisoned_before_load])
    changed = differences(digest(live[0], LAST), digest(tmp_path, LAST))
    assert not {"model weights", "master weights", "exp_avg", "exp_avg_sq"} & set(changed)


@pytest.mark.ci
def test_where_an_iteration_of_the_chain_is_gone_an_older_one_is_loaded(copied: Path, train: Train) -> None:
    shutil.rmtree(copied / "iter_0000003")
    outcome = train(SPREAD, *BF16, *PROTECTED, "--load", copied, "--exit-interval", 3)
    (warning,) = [line for line in outcome.warnings if "in its place" in line]
    assert "iter_0000002 in its place" in warning
    assert "iter_0000003, which holds the newest copies of layer 0 experts" in warning


def removed(root: Path) -> None:
    shutil.rmtree(root / "iter_0000003")


def torn(root: Path) -> None:
    (root / "iter_0000003" / ".metadata").unlink()


def replaced(root: Path) -> None:
    """As if another run had saved the same iteration."""
    removed(root)
    shutil.copytree(root / "iter_0000001", root / "iter_0000003")


def unnamed(root: Path) -> None:
    """A manifest that is sound in itself, but not of this model."""
    found = chain(root, LAST)
    one_layer = dataclasses.replace(found, holders={0: found.holders[0]})
    (root / f"iter_{LAST:07d}" / MANIFEST).write_bytes(encode(one_layer))
    seal(root / f"iter_{LAST:07d}")


def changed(root: Path) -> None:
    """A byte in the last file of an iteration that holds experts for the newest."""
    path = sorted((root / "iter_0000003").glob("*.distcp"))[-1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def manifest_missing(root: Path) -> None:
    (root / f"iter_{LAST:07d}" / MANIFEST).unlink()


HOLDER = "iter_0000003, which holds the newest copies of layer 0 experts"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (removed, HOLDER),
        (torn, HOLDER),
        pytest.param(replaced, HOLDER, marks=pytest.mark.ci),
        pytest.param(changed, "iter_0000003/__3_0.distcp is damaged: its checksum is", marks=pytest.mark.ci),
        pytest.param(unnamed, "does not name layer1.expert", marks=pytest.mark.ci),
        pytest.param(manifest_missing, "is missing", marks=pytest.mark.ci),
    ],
)
def test_an_iteration_whose_chain_is_broken_is_refused_if_it_was_asked_for(
    damage: Callable[[Path], None], reason: str, copied: Path, start: Start
) -> None:
    damage(copied)
    layout = SPREAD if damage in (unnamed, changed) else ALONE  # what the first rank finds, it finds alone
    outcome = start(layout, *BF16, *PROTECTED, "--load", copied, "--ckpt-step", LAST).wait()
    assert set(outcome.codes) == {2}, outcome.said
    assert any(reason in line for line in outcome.lines), outcome.said


@pytest.mark.ci
def test_a_checkpoint_that_failed_leaves_its_experts_to_the_next_one(train: Train, save: Path) -> None:
    saving = ["--async-save", "--save", save, "--exit-interval", 5]
    outcome = train(PLAIN, *BF16, *EACH, *IN_TURN, *saving, hooks=[partial(full_disk, 3)])
    assert any("iteration 3 was NOT saved" in line for line in outcome.warnings), outcome.said
    assert [sorted(row) for row in chain(save, 5).holders.values()] == [[1, 2, 4, 5]] * 2


@pytest.mark.ci
def test_a_checkpoint_that_would_replace_a_holder_is_complete(copied: Path, train: Train) -> None:
    outcome = train(SPREAD, *BF16, *IN_TURN, "--load", copied, "--save", copied)
    told = "iteration 6 is written with all experts: it would replace iteration 6"
    assert any(told in line for line in outcome.warnings), outcome.said
    assert chain(copied, LAST).is_complete

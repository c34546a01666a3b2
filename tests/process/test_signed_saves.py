"""Dense checkpoints of a job with a secret: only what was made with it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from runs import Layout, Start, Train, published

from megatron.core.dist_checkpointing.moe.storage.manifest import KEYED, use_secret
from moe_ckpt.commands.main import commands
from moe_ckpt.dense.integrity import NAME, check, seal

pytestmark = pytest.mark.own_loop

SMALL = Layout(pp=2, ep=1, ranks=2)
SECRET = b"the secret of this job, which nobody else knows"


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    yield file
    use_secret(None)


def test_a_forged_checkpoint_is_refused_by_name_and_an_unsigned_one_until_it_is_signed(
    start: Start, train: Train, save: Path, secret: Path, tmp_path: Path
) -> None:
    def refusal(*flags: object) -> str:
        outcome = start(SMALL, *signing, *flags).wait()
        assert set(outcome.codes) == {2}
        return outcome.said

    signing = ("--moe-ckpt-secret-file", secret)
    train(SMALL, *signing, "--save", save, "--save-interval", 3, "--async-save")
    assert published(save) == [3, 6]
    assert all((save / f"iter_{at:07d}" / NAME).read_bytes().startswith(KEYED) for at in (3, 6))

    forged = save / "iter_0000006"
    forge(forged)
    refused = CliRunner().invoke(commands, ["sign", str(forged)])
    assert "there is no secret to sign with" in str(refused.exception)
    assert check(forged) == (), "anybody can make checksums without a key fit"
    outcome = train(SMALL, *signing, "--load", save, "--train-iters", 6)
    (line,) = [one for one in outcome.warnings if "falling back" in one]
    assert "falling back to iteration 3" in line
    assert f"{forged / NAME}: it is not sealed with this job's secret" in line

    (forged / NAME).unlink()  # as stock Megatron-LM leaves it
    assert "it is not signed, and anybody may have made it" in refusal("--load", save, "--ckpt-step", 6)

    unsigned = tmp_path / "unsigned"
    train(SMALL, "--save", unsigned, "--save-interval", 6)
    assert "no usable checkpoint" in (said := refusal("--load", unsigned))
    assert "moe-ckpt sign it" in said
    use_secret(SECRET)
    for says in ("is signed", "was signed before, and is intact"):
        assert CliRunner().invoke(commands, ["sign", str(unsigned)]).output == f"{unsigned / 'iter_0000006'} {says}\n"
    assert "loaded checkpoint of iteration 6" in train(SMALL, *signing, "--load", unsigned).said


def forge(folder: Path) -> None:
    """Other weights under checksums that fit, as somebody makes them who can write there and has no secret."""
    file = max(folder.glob("*.distcp"))
    changed = bytearray(file.read_bytes())
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)
    use_secret(None)
    (folder / NAME).unlink()
    seal(folder)

"""Flags of the driver that its loop has no longer, since it is Megatron-LM's: what to use in place of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.pretrain.errors import InvalidInput

_CONVERT = "run `moe-ckpt convert --to hf` on a saved checkpoint, beside training if you like"
OLD_FLAGS: Mapping[str, str] = {
    "--export-hf-interval": _CONVERT,
    "--export-hf": _CONVERT,
    "--hf-model": "give it to `moe-ckpt convert --to hf`, which makes the folder",
    "--keep-last": "use --save-retain-interval N, with which Megatron-LM keeps the newest checkpoint and each N-th",
    "--original-max-position-embeddings": (
        "leave it out for 4096, which Megatron-LM takes, or set it in the model's config in a script of your own"
    ),
    "--moe-use-legacy-grouped-gemm": "use --moe-grouped-gemm with --transformer-impl transformer_engine",
}
"""By flag; each also with `--no-` in front."""


def refuse_old_flags(argv: Sequence[str]) -> None:
    """Judge a command line by the names of its flags.

    Args:
        argv: The flags, as they were given.

    Raises:
        InvalidInput: Some are no longer there; a sentence for each.
    """
    given = dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--"))
    names = {name: name.replace("--no-", "--", 1) for name in given}
    found = [
        f"{name} is no flag of Megatron-LM's loop: {OLD_FLAGS[old]}" for name, old in names.items() if old in OLD_FLAGS
    ]
    if found:
        raise InvalidInput("; ".join(found))

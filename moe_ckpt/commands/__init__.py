"""The `moe-ckpt` command."""

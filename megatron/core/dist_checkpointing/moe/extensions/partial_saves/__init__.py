"""Checkpoints with some of the experts, `--save-experts` (MoC-System; PEC), chosen where their state is generated.

The others stay in older checkpoints, see `moe_ckpt.dense.chain`.

    flags       the flags, which every job has
    saving      which experts a checkpoint holds, and the generation of their state alone
    loading     each expert from where its newest copy is

The last two are imported only by jobs that save or load such checkpoints.
"""

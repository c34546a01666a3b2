"""Dense checkpoints that Megatron-LM saves and loads with its own functions: published whole, checked before they are
loaded.

Megatron writes `iter_N/` file by file, and the tracker last. Around that, with its functions as they are:

    save    `dist_checkpointing.save` gets a hidden folder, `.iter_N.saving`. When all ranks have written, the integrity
            file is made (`moe_ckpt.dense.integrity`), and the folder is renamed to `iter_N`. Megatron writes the
            tracker after that. A job that is killed on the way leaves a hidden folder, which nobody reads.
    load    The checkpoint that Megatron is about to load is compared with its integrity file, each rank a share of the
            files. Where it is damaged, Megatron is told to load the one before it.
"""

"""What `moe-ckpt inspect` finds, as reports: dense checkpoints, snapshots in storage and in memory, single tensors."""

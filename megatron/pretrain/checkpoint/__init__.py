"""Dense checkpoints in Megatron's own `torch_dist` format."""

"""Dense `torch_dist` checkpoints, read and written without running anything stored in them."""

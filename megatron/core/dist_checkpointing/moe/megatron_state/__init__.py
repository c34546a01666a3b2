"""What knows Megatron-Core's objects: which operator live tensors belong to, and how their state is made whole."""

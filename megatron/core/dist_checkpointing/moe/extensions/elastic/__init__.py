"""Nodes that join a job while it trains (`--moe-ckpt-elastic` in Megatron-LM's loop)."""

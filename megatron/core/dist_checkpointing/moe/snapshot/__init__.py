"""Snapshots of a rank: copied beside training, made durable and replicated, kept as long as a recovery needs them."""

"""Training iterations again with some operators frozen: from sparse snapshots to the dense state they were made of."""

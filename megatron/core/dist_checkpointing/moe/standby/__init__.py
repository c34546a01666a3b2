"""The worker slot of a rank, as the training process sees it.

A launcher with standbys (`moe-ckpt-run`, or that of `scripts/train_cpu.sh`) starts the training script more often than
there are ranks. A process without a rank does everything that needs none, such as imports, and waits in
`wait_for_rank`. After a fault it receives a rank over a socket, with the variables that torchrun sets in the
environment, and continues from there. In a process that was started with a rank, and under any other launcher,
`wait_for_rank` returns at once.
"""

"""The seat of a rank: how a process that its launcher keeps in reserve comes to train as one.

A launcher with standbys (`moe-ckpt-run`, or `--standbys` of the driver's) starts the training script more often than
there are ranks. Those without a rank do all that needs none, such as imports, and wait in `take_seat`; after a fault
they hear over a socket of their own what torchrun says to a rank in its environment, and go on from there. In a process
that was started with a rank, and under any other launcher, `take_seat` returns at once.
"""

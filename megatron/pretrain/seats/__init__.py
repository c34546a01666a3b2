"""Seats: the ranks of a node, which processes sit in them, and who takes the seat of a process that was lost.

The launcher's side of `megatron.core.dist_checkpointing.moe.seats`. It keeps standbys: processes of the training script
that have done all that needs no rank, such as imports, and wait. When ranks are lost, torch's elastic agent decides as
ever that training starts again and which ranks its node gets. Then each seat is filled by the first that is there: a
standby, which hears over a socket of its own what torchrun would have put into its environment, or a new process.

`process` is a worker as its launcher sees it, `agent` is torch's agent over such processes and decides who sits where,
and `run` is the command.
"""

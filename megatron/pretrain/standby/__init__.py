"""Worker slots of a node and the standby processes that fill them after a fault.

The launcher's side of `megatron.core.dist_checkpointing.moe.standby`. A standby is a process of the training script
that has finished everything that needs no rank, such as imports, and waits. After a fault torch's elastic agent
decides, as always, that training restarts and which ranks its node gets. Each slot is then filled by a surviving
process, by a standby, which receives over a socket what torchrun would have put into its environment, or by a new
process.

`process` is a worker as its launcher sees it, `agent` is torch's agent over such processes and assigns them to slots,
and `run` is the command.
"""

"""A training script that trains nothing: its first rank says where it and the processes that started it listen."""

from __future__ import annotations

import sys
from datetime import timedelta

import psutil
import torch.distributed as dist

import megatron.pretrain.core_import  # noqa: F401
from megatron.pretrain.initialize import Launch, start_process_group

launch = Launch.from_environment()
start_process_group("gloo", launch, timedelta(seconds=60))
if launch.rank == 0:
    launchers = [one for one in psutil.Process().parents() if "megatron.pretrain.launch" in one.cmdline()]
    for process in (psutil.Process(), *launchers):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                sys.stdout.write(f"listens at {connection.laddr.ip}\n")
    sys.stdout.write(f"launchers: {len(launchers)}\n")
    sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()

"""A replica group of torchft, of one rank: trains a model for ever, and writes when each step was done.

`replica_loss.py` starts two of them, `torchft_group.py GROUP LIGHTHOUSE FILE PARAMETERS`, kills one, and starts
it again at once, as torchrun would.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torchft import Manager, Optimizer, ProcessGroupGloo

WIDTH, TOKENS = 512, 64
TIMEOUT = timedelta(seconds=10)


def main(group: str, lighthouse: str, file: str, parameters: int) -> None:
    """Trains; a group that comes back gets its state from the other, and its step with it."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(1234)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, parameters // WIDTH**2))]
    model = torch.nn.Sequential(*layers)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        inner.load_state_dict(found["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), load_state_dict=load, state_dict=state, min_replica_size=1,
        timeout=TIMEOUT, quorum_timeout=TIMEOUT, connect_timeout=TIMEOUT, rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse, replica_id=group,
        hostname="127.0.0.1",
    )  # fmt: skip
    optimizer = Optimizer(manager, inner)
    with open(file, "a", buffering=1) as reports:
        while True:
            optimizer.zero_grad()
            loss = model(torch.randn(TOKENS, WIDTH)).square().mean()
            loss.backward()
            for one in model.parameters():
                assert one.grad is not None
                manager.allreduce(one.grad).wait()
            optimizer.step()
            report = {"step": manager.current_step(), "groups": manager.num_participants(), "at_s": time.monotonic()}
            reports.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))

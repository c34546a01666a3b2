"""What dropping tokens from experts while training costs in validation loss: MOETION Table 1 at small scale.

    python examples/accuracy/dropped_tokens.py [--tiny]

A small GPT-MoE is trained without drops at first, and from then on with a share of the tokens of each expert dropped at
random, in every MoE layer: the expert's output counts nothing, and it learns nothing from them. docs/results gets the
data, which `reproduce/moetion_table1.py` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

SHARE, FIRST = "MOE_CKPT_DROPPED_SHARE", "MOE_CKPT_DROPPED_FIRST"
"""Set for the processes that train: which share is dropped, and the first iteration in which it is."""
SHARES = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1)
WHOLE, TINY = 320, 6


def main() -> int:
    """Train with each share from each seed, and keep what was found."""
    from campaign import LAYOUT, RELEASE, scratch_disk, with_results
    from demo_jobs import Size, revision, train

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1235, 1236])
    arguments = with_results(parser, "a few iterations and two shares")
    iterations = TINY if arguments.tiny else WHOLE
    first = 1 + iterations // 11  # 1,000 iterations of the paper's 11,000 have no drops
    size = Size(iterations, iterations, 1 if arguments.tiny else 40, ())
    made, runs = revision(), []
    with tempfile.TemporaryDirectory(prefix="dropped-tokens-", dir=scratch_disk()) as folder:
        for seed in arguments.seeds:
            for share in (SHARES[0], SHARES[-1]) if arguments.tiny else SHARES:
                own = {"MOE_CKPT_SCRIPT": __file__, SHARE: repr(share), FIRST: str(first)}
                run = train(seed, f"dropped {share:g}", size, Path(folder), (), layout=LAYOUT | own)
                runs.append({"seed": seed, "dropped": share, "loss": run.final})
                print(runs[-1], flush=True)
    data = {"iterations": iterations, "first": first, "release": RELEASE, "made": made, "runs": runs}
    if arguments.results:
        (arguments.results / "dropped-tokens.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0


def dropping(routing: Callable[..., Any], share: float, first: int) -> Callable[..., Any]:
    """The router's `routing`, whose probabilities are zero for the dropped share of what it gives to experts.

    Args:
        routing: As core has it: probabilities [tokens, experts], and which experts each token goes to.
        share: Of the tokens of each expert, in training.
        first: The first iteration in which some are dropped.
    """
    import torch

    from megatron.training import get_args

    draw = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))  # the model's own numbers stay

    def routed(self: Any, *given: Any, **named: Any) -> Any:
        probabilities, routing_map = routing(self, *given, **named)
        if self.training and get_args().curr_iteration + 1 >= first:
            kept = torch.rand(probabilities.shape, generator=draw) >= share
            probabilities = probabilities * kept.to(probabilities)
        return probabilities, routing_map

    return routed


def drop() -> int:
    """What each process runs: training, with drops."""
    import pretrain_gpt_moe
    from megatron.pretrain.initialize import use_cpu

    use_cpu()  # before Megatron-LM is imported
    from megatron.core.transformer.moe.router import TopKRouter

    routed = dropping(TopKRouter.routing, float(os.environ[SHARE]), int(os.environ[FIRST]))
    with mock.patch.object(TopKRouter, "routing", routed):
        return pretrain_gpt_moe.train(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(drop() if SHARE in os.environ else main())

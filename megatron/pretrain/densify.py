"""Recovers from snapshots in storage, replays what they need, saves a dense checkpoint, ends: `moe-ckpt convert`."""

import sys

from pretrain_gpt_moe import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:], recover_only=True))

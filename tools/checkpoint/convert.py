#!/usr/bin/env python3
"""Write an ordinary dense checkpoint from the snapshots in a --moe-ckpt-persist-dir; the same as `moe-ckpt convert`."""

import sys

from moe_ckpt import main

if __name__ == "__main__":
    sys.argv.insert(1, "convert")
    main()

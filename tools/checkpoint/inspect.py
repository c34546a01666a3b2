#!/usr/bin/env python3
"""The same as `moe-ckpt inspect`."""

import _front

if __name__ == "__main__":
    _front.run(__file__)

#!/usr/bin/env python3
"""The same as `moe-ckpt digest`."""

import _front

if __name__ == "__main__":
    _front.run(__file__)

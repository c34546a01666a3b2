"""`python -m moe_ckpt`, as the command `moe-ckpt`."""

from . import main

if __name__ == "__main__":
    main()

"""Install the Python of Transformer Engine, without its compiled code, for tests and runs on the CPU.

It goes into a folder of its own (`megatron.pretrain.testing.te_on_cpu.wheel`), because Megatron-Core takes a
Transformer Engine that it can import for one with kernels; and without what it depends on, which is CUDA. The release
is the one that tests run with.
"""

import importlib.metadata
import subprocess
import sys

from megatron.pretrain.testing.te_on_cpu.wheel import place

VERSION = "2.20.2"


def main() -> int:
    """Exit code: 0 installed or there already, else pip's."""
    folder = place()
    found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions(path=[str(folder)])}
    if VERSION in found.values():
        sys.stdout.write(f"the Python of Transformer Engine {VERSION} is in {folder} and stays\n")
        return 0
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    return subprocess.run([*pip, f"transformer-engine=={VERSION}"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

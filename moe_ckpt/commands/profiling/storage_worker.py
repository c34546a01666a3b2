"""A process that times one write to storage; hung storage hangs this process only, and its parent ends it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

_CHUNK_BYTES = 2**23


def main(folder: str, size: int) -> dict[str, float | str]:
    """Seconds of `size` bytes with fsync, or the error."""
    chunk = os.urandom(min(size, _CHUNK_BYTES))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            started = time.perf_counter()
            left = size
            while left:
                left -= file.write(chunk[:left])
            file.flush()
            os.fsync(file.fileno())
            return {"seconds": time.perf_counter() - started}
    except OSError as error:
        return {"error": error.strerror or str(error)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]))))

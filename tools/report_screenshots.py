#!/usr/bin/env python3
"""Make the pictures in docs/images from the demo's run and a job of three faults, with a headless Chromium."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from moe_ckpt.commands.main import commands

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
LARGEST_BYTES = 150_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PICTURES = (
    ("demo", "report-demo.png", "", (900, 760), False),
    ("faults", "report-recovery.png", "faults-and-recoveries", (900, 900), True),
    ("faults", "report-protection.png", "protection", (900, 760), False),
    ("faults", "report-dark.png", "", (700, 900), True),
)
"""Whose page, the picture, its part, its size in pixels, and whether it is dark."""


def main() -> None:
    """Raises SystemExit where there is no browser, or a picture is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", required=True, help="full.jsonl of scripts/demo.py")
    parser.add_argument("--faults", required=True, help="--metrics-jsonl of a job with three faults and storage")
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser: install one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-pictures-") as folder:
        for name in ("demo", "faults"):
            made = ["report", getattr(arguments, name), "--out", f"{folder}/{name}.html"]
            commands.main(made, prog_name="moe-ckpt", standalone_mode=False)
        for name, picture, part, (width, height), is_dark in PICTURES:
            page = Path(folder) / f"{name}-{picture}.html"
            only = f"<style>main>:not(#{part}){{display:none}}</style></head>" if part else "</head>"
            page.write_text(Path(folder, f"{name}.html").read_text().replace("</head>", only))
            flags = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
            command = [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                f"--user-data-dir={folder}/profile", f"--window-size={width},{height}", *flags,
                f"--screenshot={IMAGES / picture}", page.as_uri(),
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            if (IMAGES / picture).stat().st_size > LARGEST_BYTES:
                raise SystemExit(f"{picture} has more than {LARGEST_BYTES} bytes")


if __name__ == "__main__":
    main()

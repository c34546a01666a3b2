"""Unpack the packs of `make gpu-bundle` that are in a folder, for `scripts/gpu_there.sh`: standard library only.

Each pack goes to a folder of its name. That of `base` has a `sitecustomize.py` by which a Python that has it on its
path finds this project. Exit code: 0 done, 2 with one line that says what is wrong.
"""

import json
import platform
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = """import sys
sys.path.insert(0, {root!r})
import moe_ckpt_finder  # finds our packages below those of the megatron-core that was unpacked here
"""


class UnusablePack(Exception):
    """A pack that cannot be used here; the text says why and what to do."""


def unpack(pack: Path, site: Path) -> bool:
    """Unpack one into its folder; False where it is there already.

    Raises:
        UnusablePack: It is damaged, or made for another machine.
    """
    name = pack.name.split(".")[0]
    folder = site / name
    try:
        with tarfile.open(pack) as archive:
            members = archive.getmembers()
            about = next(one for one in members if one.name == f"{name}.json")
            text = archive.extractfile(about).read()
            check(name, json.loads(text))
            if (folder / about.name).is_file() and (folder / about.name).read_bytes() == text:
                return False
            archive.extractall(folder, [one for one in members if one is not about], filter="data")
            archive.extract(about, folder, filter="data")  # last: what was cut off is unpacked again
    except ImportError as error:
        advice = f"{sys.executable} cannot read {pack.name} ({error}): set MOE_CKPT_PYTHON to one with lzma"
        raise UnusablePack(advice) from error
    except (tarfile.TarError, EOFError, OSError, StopIteration, ValueError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise UnusablePack(f"damaged {pack} ({why}): run `make gpu-bundle` again") from error
    return True


def check(name: str, made_for: dict) -> None:
    """Refuse a pack of another kind of machine. Its GPU is asked about later: here is no torch yet."""
    here = {"machine": platform.machine(), "python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    for what, found in here.items():
        if made_for[what] != found:
            raise UnusablePack(
                f"pack {name} is for {what} {made_for[what]}, but this is {found}: run `make gpu-bundle` for it"
            )


def main(bundle: Path, site: Path) -> int:
    """See above."""
    packs = sorted(bundle.glob("*.tar.xz"))
    try:
        if not (packs or (site / "base" / "base.json").is_file()):
            raise UnusablePack(f"no pack in {bundle}: run `make gpu-bundle` and bring its base.tar.xz along")
        for pack in packs:
            sys.stdout.write(f"gpu-there: {pack.name} {'unpacked' if unpack(pack, site) else 'was there'}\n")
        if not (site / "base" / "base.json").is_file():
            raise UnusablePack(f"pack base is missing in {bundle}: bring base.tar.xz along with every part")
    except UnusablePack as error:
        sys.stderr.write(f"gpu-there: {error}\n")
        return 2
    (site / "base" / "sitecustomize.py").write_text(SITE.format(root=str(ROOT)))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

"""Lets Python find our packages below `megatron` where another Megatron hides them; importing this module arranges it.

Our packages lie below `megatron.core`, which has one folder only: that of the Megatron-Core that Python finds first. If
that is a source tree on PYTHONPATH, or belongs to an image on which a virtual environment was laid, ours are looked for
there, in vain. The finder below is asked last, after Python has found nothing, and knows where they are.

`import moe_ckpt` and all our commands arrange it, and so does `import moe_ckpt.core`. For programs of others, which
import our packages by their full names, an environment can arrange it whenever Python starts:

    python -m moe_ckpt_finder enable     writes moe_ckpt_finder.pth beside this module; disable removes it

So it imports nothing that is not there already.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

ROOT = os.path.dirname(os.path.abspath(__file__))
PACKAGES = ("megatron.core.dist_checkpointing.moe", "megatron.pretrain")


class HiddenPackages:
    """The entry of `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Where one of our packages lies; None for all other modules. Raises ModuleNotFoundError if it is gone."""
        if name not in PACKAGES:
            return None
        from importlib.util import spec_from_file_location

        folder = os.path.join(ROOT, *name.split("."))
        file = os.path.join(folder, "__init__.py")
        if not os.path.isfile(file):
            raise ModuleNotFoundError(f"{name} is not in {folder}: install megatron-moe-ckpt again", name=name)
        return spec_from_file_location(name, file, submodule_search_locations=[folder])


if HiddenPackages not in sys.meta_path:
    sys.meta_path.append(HiddenPackages)


def main(argv: "list[str]") -> int:
    """Enable or disable the hook for all programs of this environment. Exit code: 0, or 2 for wrong usage."""
    hook = os.path.join(ROOT, "moe_ckpt_finder.pth")
    if argv == ["enable"]:
        with open(hook, "w") as file:
            file.write("import moe_ckpt_finder\n")
    elif argv == ["disable"]:
        if os.path.exists(hook):
            os.remove(hook)
    else:
        sys.stderr.write("usage: python -m moe_ckpt_finder enable|disable\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

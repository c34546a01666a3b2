from setuptools import setup
setup(name="megatron-moe-ckpt", version="0.1.0", packages=["megatron.core.dist_checkpointing.moe", "megatron.pretrain"])

# shellcheck shell=bash
# Sourced on each node, in the container, before its ranks start. Interface names are those of a DGX H100: change them.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_SOCKET_IFNAME=bond0
export GLOO_SOCKET_IFNAME=bond0
export NCCL_IB_HCA=mlx5
export NCCL_IB_TIMEOUT=22
export NVTE_FWD_LAYERNORM_SM_MARGIN=16
export NVTE_BWD_LAYERNORM_SM_MARGIN=16

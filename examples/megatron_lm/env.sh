# Sourced on each node, in the container, before its ranks start. Interface names are those of a DGX H100: change them.
CUDA_DEVICE_MAX_CONNECTIONS=1
NCCL_SOCKET_IFNAME=bond0
GLOO_SOCKET_IFNAME=bond0
NCCL_IB_HCA=mlx5
NCCL_IB_TIMEOUT=22
NVTE_FWD_LAYERNORM_SM_MARGIN=16
NVTE_BWD_LAYERNORM_SM_MARGIN=16

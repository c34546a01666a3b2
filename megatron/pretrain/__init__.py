"""The training driver: GPT with Mixture-of-Experts layers on Megatron-Core."""

import warnings

# Core says in four modules, on import and on every rank, that optional kernels are missing; and torch that core calls
# collectives by their older names. Neither is news to the user, and both would bury what is.
warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine).*(not installed|Falling back).*")
warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.distributed\..* is deprecated.*")
warnings.filterwarnings(
    "ignore", category=FutureWarning, message=r".*(ShardedTensor|`load_state_dict` is deprecated).*"
)
warnings.filterwarnings("ignore", message=r".*full scope is deprecated.*")
warnings.filterwarnings("ignore", message=r".*\.grad attribute of a Tensor that is not a leaf.*")

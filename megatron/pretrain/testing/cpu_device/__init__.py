"""Lets unmodified Megatron-LM train on the CPU with gloo: one table of reversible mappings.

Megatron-Core asks CUDA for devices, streams and random numbers in some 350 places and writes `device="cuda"` as a
literal. `install()` maps exactly those names to the CPU, `uninstall()` puts every original back. Each row of
`table.PATCHES` says what is replaced, by what, and why; a row whose attribute is gone from torch or Megatron-Core makes
`install()` fail before anything is changed. Nothing happens on import, so a run on GPUs that never calls `install()` is
untouched.

Random numbers. CPU kernels draw from torch's default generator, so that one generator *is* the device's: the
`torch.cuda` random functions read and write it, and saving the device's state saves everything that dropout and
initialisation depend on. There is no second, host-side generator, so inside `megatron.core.tensor_parallel.random`
(the tracker and activation recomputation) the host state is void: an empty tensor that never changes. Everywhere else
`torch.manual_seed`, `torch.get_rng_state` and `torch.set_rng_state` mean what they always mean on a CPU; a checkpoint
that stores both states stores the same bytes twice, in any order of restoring. The one consequence to know: code that
draws from torch's default generator on the side (a `DataLoader` draws its base seed there whenever it is iterated)
moves the device's sequence too, and has to be given a generator of its own to leave it alone.

Host copies. On a GPU `tensor.cpu()` and `tensor.to("cpu")` are copies, on the CPU they are the tensor itself: whoever
reads such a "copy" while training continues has to make one. Pinning does make one, as Megatron-Core depends on it.

Threads. torch 2.13 runs the collectives of a gloo group on two threads, and both write down which collective ended
last, as text and without a lock. A name of 16 characters or more, and gloo has one, ALLGATHER_COALESCED, is then freed
twice once in a long while, and the process dies of a broken heap somewhere else. One thread per group cannot; it runs
collectives in the order in which all ranks issue them.

Small numbers. A CPU takes a hundred times as long for denormal numbers (below 1.2e-38) as for others, and after some
hundred iterations training makes enough of them to take a third longer. They count as zero while this is installed, in
this thread and those that it starts.

Optimizer. Megatron-Core takes Adam from Transformer Engine or Apex wherever one can be imported, and theirs needs a
GPU: neither may be importable in a process that calls `install()`, but for the Transformer Engine of `te_on_cpu`, whose
kernels are made for the CPU.

Checked against megatron-core 0.19.2 with torch 2.14.1.
"""

from megatron.pretrain.testing.cpu_device.switch import install, installed, is_installed, uninstall

__all__ = ["install", "installed", "is_installed", "uninstall"]

"""Survivors keep process, model and state after a fault; only what connects them is made again.

A rank that lost a peer parks its state and closes its session, as in any fault. Where its launcher keeps survivors
(see `standby`) the process does not end then: `process_groups` takes its process groups down, the launcher assigns
the slots of lost ranks to standbys, all ranks connect again, and each reference to an old group in model and
optimizer is replaced by the new group of the same name. CUDA graphs and buffers that peers write to are bound to
connections in other ways; they are released before, in the same file. A process that takes a lost rank's slot
builds its model without the survivors, which do not build again: `building`. `process_restart` puts it together for
training loops.
"""

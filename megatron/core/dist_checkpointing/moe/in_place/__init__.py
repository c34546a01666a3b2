"""Survivors keep process, model and state after a fault; only what connects them is made anew.

A rank that lost a peer parks its state and lets go of its session as ever. Where its launcher keeps survivors (see
`seats`) the process does not end then: `process_groups` takes its process groups down, the launcher gives the seats of
lost ranks to standbys, all ranks connect again, and whatever in the model and the optimizer refers to an old group gets
the new one of the same name. A process that takes a lost rank's seat builds its model without the survivors, which do
not build again: `building`. `kept_process` puts it together for training loops.
"""

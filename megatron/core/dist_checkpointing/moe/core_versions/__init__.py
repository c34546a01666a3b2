"""What differs between the releases of Megatron-Core that this package works with, each difference in one place.

    training       batches, the trackers of auxiliary losses, gradient norms, fields of a model's configuration
    seams          the names that `sparse` relies on, and whether the installed core has them as they were read

Where a difference can be seen, as a name or a parameter that is there or not, it is asked for rather than the version.
"""

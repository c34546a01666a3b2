"""What the subsystem needs from its surroundings, where there is more than one implementation.

Packages that do not import each other meet here: the values and errors that cross a port are re-exported beside it.
"""

from ..errors import NoRoom, PeerLost, StoreFailure
from ..types.layout import (
    DTYPE_BYTES,
    Facts,
    Field,
    Json,
    Layout,
    Listing,
    Manifest,
    Record,
    SnapshotId,
    Torn,
)
from .storage import MappedReader, MappedStore, MappedWriter, OlderMemory, ReadableStore, Reader, Store, Writer
from .training import (
    RANDOM,
    BoundarySink,
    BoundarySource,
    Capturer,
    Execution,
    RecordedStep,
    Restorer,
    SteppedShard,
    StepRecorder,
    TrainerState,
)
from .transport import Clock, Executor, Lap, Pace, SendPace, Stopwatch, Task, Transfer, Transport, WaitObserver

__all__ = [
    "DTYPE_BYTES",
    "RANDOM",
    "BoundarySink",
    "BoundarySource",
    "Capturer",
    "Clock",
    "Execution",
    "Executor",
    "Facts",
    "Field",
    "Json",
    "Lap",
    "Layout",
    "Listing",
    "Manifest",
    "MappedReader",
    "MappedStore",
    "MappedWriter",
    "NoRoom",
    "OlderMemory",
    "Pace",
    "PeerLost",
    "ReadableStore",
    "Reader",
    "Record",
    "RecordedStep",
    "Restorer",
    "SendPace",
    "SnapshotId",
    "StepRecorder",
    "SteppedShard",
    "Stopwatch",
    "Store",
    "StoreFailure",
    "Task",
    "Torn",
    "TrainerState",
    "Transfer",
    "Transport",
    "WaitObserver",
    "Writer",
]

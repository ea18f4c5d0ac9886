"""Collectives over one process group, and the autograd pairs that tensor and sequence parallelism are made of.

    comm = Communicator(mesh.group("tp"))
    y = comm.all_reduce(x)                  # waits
    pending = comm.all_gather_async(x)      # does not; y = pending.wait()

`Communicator` is the interface; what moves the bytes is a `Transport`: shared memory between CPU ranks of one host,
that and gloo between the leaders of several hosts, torch.distributed (gloo, NCCL) for the rest. Importing this package
touches no process group, and a group of one rank (or None) never does.
"""

from fastpar.comm.autograd import (
    all_to_all,
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
    scatter_to,
)
from fastpar.comm.coalesce import all_reduce_coalesced
from fastpar.comm.communicator import Communicator, GroupLike, world
from fastpar.comm.errors import CommError, CommMismatchError, CommTimeoutError, PeerFailedError, PeerLostError
from fastpar.comm.observers import CommRecord, CommSpan, CommTrace, record, trace
from fastpar.comm.pending import Pending
from fastpar.comm.plain_data import PlainDataError
from fastpar.comm.point_to_point import PointToPoint
from fastpar.comm.scaled_codes import DelayedScalingWire
from fastpar.comm.shards import shard_range, shard_sizes
from fastpar.comm.shared_memory.region import SharedRegion
from fastpar.comm.symmetric.buffer import SymmetricBuffer
from fastpar.comm.symmetric.calibration import Calibration, calibrate
from fastpar.comm.symmetric.collectives import SymmetricCollectives
from fastpar.comm.transport import Transport
from fastpar.comm.wire_formats import BlockWire, CastWire, PlainWire, Wire

__all__ = [
    "BlockWire",
    "Calibration",
    "CastWire",
    "CommError",
    "CommMismatchError",
    "CommRecord",
    "CommSpan",
    "CommTimeoutError",
    "CommTrace",
    "Communicator",
    "DelayedScalingWire",
    "GroupLike",
    "PeerFailedError",
    "PeerLostError",
    "Pending",
    "PlainDataError",
    "PlainWire",
    "PointToPoint",
    "SharedRegion",
    "SymmetricBuffer",
    "SymmetricCollectives",
    "Transport",
    "Wire",
    "all_reduce_coalesced",
    "all_to_all",
    "calibrate",
    "copy_to",
    "gather_from",
    "gather_sequence",
    "record",
    "reduce_from",
    "reduce_scatter_sequence",
    "scatter_to",
    "shard_range",
    "shard_sizes",
    "trace",
    "world",
]

"""The errors of collectives that failed or were not finished in time."""

from __future__ import annotations

NEW_GROUP = "make a new group, as fastpar.init_mesh does when all ranks call it again"


class CommError(RuntimeError):
    """A collective failed or missed its deadline.

    The message names the operation, its sequence number, the ranks of the group, this rank, shape and dtype, and the
    cause. Unless a subclass says otherwise the group is in an unknown state afterwards: make a new one. `init_mesh`,
    called again by all ranks, does not use a group in which a collective has failed.
    """


class CommTimeoutError(CommError):
    """The deadline passed; the message names the ranks that were missing."""


class PeerLostError(CommError):
    """The process of another rank has ended."""


class PeerFailedError(CommError):
    """Another rank has given up and said why: `rank` (of the group) and `reason`."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} gave up: {reason}")
        self.rank, self.reason = rank, reason

    def __reduce__(self) -> tuple[type[PeerFailedError], tuple[int, str]]:  # the arguments are not those of the base
        return type(self), (self.rank, self.reason)


class CommMismatchError(CommError):
    """The ranks called different collectives, or the same one with other shapes, dtypes or options.

    Every rank gets this error, with what every rank called, before any data was touched, and the group can be used
    further. So it is between CPU ranks, however they are connected; for tensors on devices with
    `Communicator(check=True)`. Numbers of elements are compared, not shapes.
    """

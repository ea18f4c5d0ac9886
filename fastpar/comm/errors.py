"""The error of a collective that failed or was not finished in time."""


class CommError(RuntimeError):
    """A collective failed or missed its deadline.

    The message names the operation, its sequence number, the ranks of the group, this rank, shape and dtype, and the
    deadline. After a failure, or once an operation was given up by its transport, the group is in an unknown state:
    make a new one.
    """

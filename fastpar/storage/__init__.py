"""Files for tensors that do not fit into memory: asynchronous, checked, double-buffered.

store = fastpar.storage.TensorStore("/nvme/scratch")
store.write("exp_avg", exp_avg).wait()
fastpar.storage.stream(store, [("master.0", "exp_avg.0"), ("master.1", "exp_avg.1")], work)
"""

from fastpar.storage.async_file import Transfer
from fastpar.storage.errors import ChecksumError, StorageError
from fastpar.storage.store import TensorStore
from fastpar.storage.streaming import stream

__all__ = ["ChecksumError", "StorageError", "TensorStore", "Transfer", "stream"]

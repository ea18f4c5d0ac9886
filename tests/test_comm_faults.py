"""What ranks get when they do not do the same, are late, or die: over shared memory, a clean error on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import Communicator
from fastpar.comm.shared_region import SharedRegion
from tests.dist import run_ranks

# ---- data in a region on some ranks only



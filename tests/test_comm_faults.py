"""What ranks get when they do not do the same, are late, or die: over shared memory, a clean error on every rank."""

from __future__ import annotations


# ---- data in a region on some ranks only

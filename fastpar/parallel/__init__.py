from fastpar.parallel import styles
from fastpar.parallel.styles import *  # noqa: F403

__all__ = list(styles.__all__)

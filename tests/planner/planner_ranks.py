"""What ranks do in tests of the planner's calibration."""

from unittest import mock

from fastpar.planner import calibration
from fastpar.planner.calibration import Sizes, calibrate

TINY = Sizes((16, 32), (16, 64), (32, 2, 16), 4096, (32, 2, 64), 2)


def calibrated() -> dict:
    """A machine of tiny shapes, as data."""
    with mock.patch.dict(calibration.SIZES, {"cpu": TINY}):
        return calibrate("tiny", device="cpu", seconds=1.0).to_json()

"""How every kernel here is launched: on the device of its tensors, which need not be the current one.

Triton takes the stream of the current device. A launch for tensors of another would read memory that this stream does
not order, or that the device does not map. tests/gpu/test_triton_helpers.py knows that nothing is launched otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def launch(kernel: Any, programs: int | tuple[int, ...], device: torch.device, *arguments: Any, **options: Any) -> None:
    """kernel[programs](*arguments, **options); `programs` is a number of them or a grid."""
    grid = (programs,) if isinstance(programs, int) else programs
    if device.type != "cuda" or device.index == torch.cuda.current_device():  # to enter it again takes 2 us
        kernel[grid](*arguments, **options)
        return
    with torch.cuda.device(device):
        kernel[grid](*arguments, **options)


def launch_named(kernel: Any, programs: int, device: torch.device, arguments: Mapping[str, Any]) -> None:
    """The same with all arguments by name."""
    launch(kernel, programs, device, **arguments)

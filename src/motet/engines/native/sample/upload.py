"""From the host to the device without waiting for what the device is doing.

A copy from ordinary memory makes the host wait until everything launched before it is done: in the middle of a step
that would be the whole forward pass, and every such copy another wait. From pinned memory the device copies by itself.
torch keeps that memory from being used again before the copy is over.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def uploaded(numbers: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device, in its own dtype and shape."""
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def uploaded_ids(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """[numbers] int64."""
    return uploaded(np.array(numbers, np.int64), device)

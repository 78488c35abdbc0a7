"""The device on which Triton's kernels can run here."""

from importlib.util import find_spec

import torch

from motet.settings.server_config import environment

INTERPRETED = environment().get("TRITON_INTERPRET") == "1"
"""Triton selects the interpreter or the compiler when it is imported, so a test run has only one of them."""
TRITON = find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda:0"
RUNS = TRITON and (INTERPRETED or torch.cuda.is_available())
REASON = "needs a CUDA device, or Triton and its interpreter: make triton"

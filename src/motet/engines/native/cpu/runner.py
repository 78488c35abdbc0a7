"""Runs a packed model on one step's flat batch."""

import ctypes
import weakref

import numpy as np
import numpy.typing as npt
import torch

from motet.engines.native.cpu import library as c
from motet.engines.native.cpu.reads import Ints, ints, reads_of
from motet.engines.native.cpu.weights import PackedModel
from motet.engines.native.inputs import SickRowsError, StepInputs
from motet.engines.native.kv.storage import KVStorage


class CpuRunner:
    """Owns the threads of the forward pass. The interpreter is free while they work."""

    def __init__(self, model: PackedModel, storage: KVStorage, *, num_threads: int, kernels: ctypes.CDLL) -> None:
        self.storage = storage
        self.device = storage.keys.device
        self._model = model
        self._run = kernels.motet_run
        self._forward = kernels.motet_open(ctypes.byref(model.struct), num_threads)
        self._logits = torch.empty(0, model.vocab_size)
        self._sick: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        weakref.finalize(self, kernels.motet_close, self._forward)

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [rows wanted, vocab_size] float32; rows as in `inputs.logit_rows`, without padding."""
        logits = self._room_for(inputs.num_logits)
        self._sick = np.zeros(len(inputs.slots), np.uint8)
        reads = reads_of(inputs.attention)
        rows: list[Ints] = [ints(x) for x in (inputs.token_ids, inputs.positions, inputs.slots)]
        logit_rows = ints(inputs.logit_rows)
        batch = c.Batch(
            len(self._sick),
            len(reads.spans) // c.SPAN_INTS,
            inputs.num_logits,
            *(array.ctypes.data for array in (*rows, reads.spans, reads.pieces, reads.tables, logit_rows)),
            logits.data_ptr(),
            self._sick.ctypes.data,
        )
        self._run(self._forward, ctypes.byref(batch))
        return logits

    def verify(self) -> None:
        if self._sick.any():
            raise SickRowsError(self._sick.nonzero()[0].tolist())

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        self.storage.copy(torch.tensor(source), torch.tensor(target))

    def settle(self) -> None:
        """What was run is in memory when `run` returns."""

    def _room_for(self, rows: int) -> torch.Tensor:
        """The same memory step after step: fresh pages would cost more than what is written to them."""
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self._model.vocab_size)
        return self._logits[:rows]

"""Runs a packed model on a step's flat batch: turns the step's inputs into arrays, and calls the compiled kernels."""

import ctypes
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from motet.engines.native import compiled_kernels as c
from motet.engines.native.attention.attention_plan import STRETCH, AttentionPlan, Ints, ints
from motet.engines.native.cpu.packed_adapters import adapter_arrays
from motet.engines.native.cpu.packed_weights import PackedModel
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.step.inputs import NonFiniteRowsError, StepInputs


class CpuRunner:
    """Runs the forward pass and owns its threads. The GIL is released while they work."""

    def __init__(self, model: PackedModel, storage: KVStorage, *, num_threads: int, kernels: ctypes.CDLL) -> None:
        self.device = storage.keys.device
        self.copy_slots = storage.copy
        self._kernels = kernels
        self._num_threads = num_threads
        self._run = kernels.motet_run
        self._logits = torch.empty(0, model.vocab_size)
        self._non_finite: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._trunk_keys_read: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        self.trunk_tokens_saved = 0
        self._open(model)

    @property
    def model(self) -> PackedModel:
        return self._model

    def use(self, model: PackedModel) -> None:
        """Switches to another model of the same shape. Must be called between two runs."""
        self._close()
        self._open(model)

    def _open(self, model: PackedModel) -> None:
        self._model = model
        self._forward = self._kernels.motet_open(ctypes.byref(model.struct), self._num_threads)
        self._close = weakref.finalize(self, self._kernels.motet_close, self._forward)

    def run(self, inputs: StepInputs) -> Tensor:
        """Returns logits [num_logits, vocab_size] float32 of the rows `inputs.logit_rows`, without padding. The memory
        is reused by the next run."""
        if len(self._logits) < inputs.num_logits:
            self._logits = torch.empty(inputs.num_logits, self._model.vocab_size)
        logits = self._logits[: inputs.num_logits]  # reused, because page faults would take longer than the writes
        self._non_finite = np.zeros(len(inputs.slots), np.uint8)
        rows = [ints(numbers) for numbers in (inputs.token_ids, inputs.positions, inputs.slots)]
        shape = self._model.struct
        max_rows = c.MAX_LINES // (shape.heads // shape.kv_heads)
        spans, pieces, tables = reads_of(inputs.attention, shape.block_size, max_rows=max_rows)
        arrays = (*rows, spans, pieces, tables, ints(inputs.logit_rows))
        adapters, low_ranks = adapter_arrays(inputs.adapters, len(inputs.slots)) if inputs.adapters else (None, None)
        batch = c.KernelBatch(
            len(self._non_finite),
            len(spans) // c.SPAN_INTS,
            inputs.num_logits,
            len(inputs.attention.trunks),
            *(array.ctypes.data for array in arrays),
            logits.data_ptr(),
            self._non_finite.ctypes.data,
            None if adapters is None else adapters.ctypes.data,
            None if low_ranks is None else ctypes.addressof(low_ranks),
            self._trunk_keys_read.ctypes.data,
        )
        self._run(self._forward, ctypes.byref(batch))
        trunk_tokens = sum(trunk.num_keys for trunk in inputs.attention.trunks)
        self.trunk_tokens_saved = trunk_tokens - int(self._trunk_keys_read[0])
        return logits

    def verify(self) -> None:
        if self._non_finite.any():
            raise NonFiniteRowsError(self._non_finite.nonzero()[0].tolist())

    def settle(self) -> None:
        """Does nothing, because all results are in memory when `run` returns."""


class PackedWeights:
    """`ModelWeights` of the packed model of a runner. New weights are written to a second packed model, its twin."""

    def __init__(self, runner: CpuRunner) -> None:
        self._runner = runner
        self.shapes = {name: location.shape for name, location in runner.model.locations.items()}
        self.tied = runner.model.tied

    def dtype_of(self, name: str) -> torch.dtype:
        return self._runner.model.locations[name].dtype

    def stage(self, *, complete: bool) -> "StagedPackedWeights":
        return StagedPackedWeights(self._runner, self._runner.model.twin(empty=complete))

    def numbers(self, name: str) -> list[Tensor]:
        return self._runner.model.numbers(name)

    def release_pages(self) -> None:
        self._runner.model.memory.release_pages()


@dataclass(frozen=True)
class StagedPackedWeights:
    """`StagedWeights` of a runner's model, in the memory of its twin until `apply`."""

    runner: CpuRunner
    twin: PackedModel

    def write(self, name: str, tensor: Tensor) -> None:
        self.twin.write(name, tensor)

    def apply(self) -> None:
        self.runner.use(self.twin)


def reads_of(plan: AttentionPlan, block_size: int, *, max_rows: int) -> tuple[Ints, Ints, Ints]:
    """Returns the reads of a step as flat arrays of the structs in `csrc/model.h`: spans of rows (a group's choices, or
    a piece of a prompt), their pieces, and block tables. `max_rows`: maximum number of rows of one read."""
    spans: list[int] = []
    pieces: list[int] = []
    tables: list[int] = []

    def append_table(table: Sequence[int]) -> int:
        begin = len(tables)
        tables.extend(table)
        return begin

    tails = sorted(
        (read.rows[i * read.rows_per_piece], read.rows_per_piece, read.first_offsets[i], append_table(table))
        for read in plan.tails
        for i, table in enumerate(read.tables)
    )
    at = 0
    for trunk in plan.trunks:
        first_piece = at
        while at < len(tails) and tails[at][0] < trunk.end:
            row, count, offset, table = tails[at]
            pieces += (row, row + count, offset, table)
            at += 1
        spans += (trunk.begin, trunk.end, first_piece, at, trunk.num_keys, append_table(trunk.table))
    for prompt, num_shared in zip(plan.prompts, _shared_keys(plan, max_rows), strict=True):
        at, table = len(pieces) // c.PIECE_INTS, append_table(prompt.table)
        pieces += (prompt.begin, prompt.end, prompt.first_position - num_shared, table + num_shared // block_size)
        spans += (prompt.begin, prompt.end, at, at + 1, num_shared, table)
    return ints(spans), ints(pieces), ints(tables)


def _shared_keys(plan: AttentionPlan, max_rows: int) -> list[int]:
    """Returns for each prompt the number of leading keys that are read like a trunk, so that the kernels can read them
    once for all prompts and groups with the same blocks: all complete stretches before the prompt's rows, if another
    prompt or trunk has the same first block. Rows that fill a read gain nothing from sharing it."""
    num_keys = [prompt.first_position // STRETCH * STRETCH for prompt in plan.prompts]
    first_blocks = [
        prompt.table[0] if keys and prompt.end - prompt.begin < max_rows else None
        for prompt, keys in zip(plan.prompts, num_keys, strict=True)
    ]
    readers = Counter(first_blocks)
    readers.update(trunk.table[0] for trunk in plan.trunks if trunk.num_keys)
    return [
        keys if first is not None and readers[first] > 1 else 0
        for first, keys in zip(first_blocks, num_keys, strict=True)
    ]

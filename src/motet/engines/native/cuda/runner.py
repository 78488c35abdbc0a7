"""Runs the model on a GPU: one copy to it a step, one graph where there is one, and no wait before tokens are wanted.

    inputs ─► work ─► integers ─► pinned memory ─► device ─► graph of the bucket, or the model's own launches ─► logits
                                                                                └─► one flag: are all rows finite?

Steps that only decode are replayed from the graph of the next larger bucket of rows; steps with prompts, and those that
no bucket holds, are launched piece by piece. The flag is on its way back while tokens are drawn, and is looked at when
they are here.
"""

from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from motet.engines.native.cuda.graphs import Recorder, Replay
from motet.engines.native.cuda.layout import Sizes, blank, bucket_sizes, buckets, fill, most_parts, sizes_of
from motet.engines.native.cuda.staging import Staging
from motet.engines.native.cuda.step import Operators, Scratch, Step, StepTensors
from motet.engines.native.cuda.work import Geometry, Work, plan_work
from motet.engines.native.inputs import SickRowsError, StepInputs
from motet.engines.native.kv.storage import KVStorage


@dataclass(frozen=True)
class CudaSettings:
    geometry: Geometry
    operators: Operators
    recorder: Recorder | None
    """None: no graphs, every step is launched piece by piece."""
    max_rows: int
    """Of a decode step."""
    max_tables: int
    """Block ids of a decode step."""


@dataclass(frozen=True)
class _Bucket:
    """A graph for up to so many rows."""

    sizes: Sizes
    replay: Replay


class _Graphs:
    """The graphs of all buckets, and the memory they share: what one step wrote, the next overwrites."""

    def __init__(self, memory: torch.Tensor, scratch: Scratch, logits: torch.Tensor) -> None:
        self.memory = memory
        self.scratch = scratch
        self.logits = logits
        self.buckets: list[_Bucket] = []
        """Small ones first."""

    def bucket_for(self, needed: Sizes) -> _Bucket | None:
        return next((bucket for bucket in self.buckets if bucket.sizes.holds(needed)), None)


class CudaRunner:
    """A model and the KV memory it reads and writes; see `core.ModelRunner`."""

    def __init__(self, model: PreTrainedModel, storage: KVStorage, settings: CudaSettings) -> None:
        self.storage = storage
        self.device = storage.keys.device
        self.model = model
        self._settings = settings
        self._staging = Staging(self.device)
        self._sick = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._graphs = None if settings.recorder is None else self._record(settings.recorder)

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [rows wanted, vocab_size] in the model's dtype, until the next run."""
        work = plan_work(inputs, self._settings.geometry)
        needed = sizes_of(inputs, work)
        logits = self._replayed(inputs, work, needed)
        if logits is None:
            logits = self._launched(inputs, work, needed)
        self._staging.fetch_flag(self._sick)
        return logits[: needed.logits]

    def verify(self) -> None:
        """SickRowsError if a row of the last run came to nothing."""
        if self._staging.flag():
            raise SickRowsError(self._sick.nonzero().flatten().tolist())

    @torch.inference_mode()
    def copy_slots(self, source: list[int], target: list[int]) -> None:
        """Copies KV from slots to slots, in all layers."""
        both = torch.tensor([source, target], dtype=torch.int64).to(self.device)
        self.storage.copy(both[0], both[1])

    def settle(self) -> None:
        """A GPU runs behind what it is told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _replayed(self, inputs: StepInputs, work: Work, needed: Sizes) -> torch.Tensor | None:
        """None if no graph holds the step."""
        graphs = self._graphs
        if graphs is None or inputs.attention.prompts or (bucket := graphs.bucket_for(needed)) is None:
            return None
        count = fill(self._staging.room(bucket.sizes.ints), inputs, work, bucket.sizes)
        self._staging.send(count, graphs.memory)
        bucket.replay()
        self._sick = graphs.scratch.sick
        return graphs.logits

    def _launched(self, inputs: StepInputs, work: Work, needed: Sizes) -> torch.Tensor:
        count = fill(self._staging.room(needed.ints), inputs, work, needed)
        memory = torch.empty(needed.ints, dtype=torch.int32, device=self.device)
        self._staging.send(count, memory)
        settings = self._settings
        scratch = Scratch.empty(needed.rows, int(work.first_part[-1]), self.storage, settings.geometry)
        self._sick = scratch.sick
        return self._forward(StepTensors.over(memory, needed), scratch)

    @torch.inference_mode()
    def _record(self, recorder: Recorder) -> _Graphs:
        """Large buckets first: the memory between the layers of the largest holds that of the others."""
        settings, device = self._settings, self.device
        sizes = [
            bucket_sizes(rows, settings.geometry, tables=settings.max_tables) for rows in buckets(settings.max_rows)
        ]
        most = sizes[-1]
        memory = torch.zeros(most.ints, dtype=torch.int32, device=device)
        scratch = Scratch.empty(most.rows, most_parts(most, settings.geometry), self.storage, settings.geometry)
        self._staging.send(blank(self._staging.room(most.ints), most), memory)
        graphs = _Graphs(memory, scratch, torch.empty_like(self._forward(StepTensors.over(memory, most), scratch)))
        for one in reversed(sizes):
            self._staging.send(blank(self._staging.room(one.ints), one), memory)
            tensors = StepTensors.over(memory, one)
            graphs.buckets.insert(0, _Bucket(one, recorder.record(partial(self._forward_into, graphs, tensors))))
        return graphs

    def _forward_into(self, graphs: _Graphs, tensors: StepTensors) -> None:
        logits = self._forward(tensors, graphs.scratch)
        graphs.logits[: len(logits)].copy_(logits)

    def _forward(self, tensors: StepTensors, scratch: Scratch) -> torch.Tensor:
        settings = self._settings
        scratch.sick.zero_()
        output = self.model(
            input_ids=tensors.token_ids.unsqueeze(0),
            position_ids=tensors.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=tensors.logit_rows,
            step=Step(tensors, scratch, self.storage, settings.geometry, settings.operators),
        )
        logits = output.logits[0]
        if not isinstance(logits, torch.Tensor):
            raise TypeError(f"the model returned {type(logits).__name__} for logits")
        return logits

"""Runs the model on a GPU: one copy to it for each step, one graph if there is one, and no wait until tokens are read.

    inputs ─► work ─► integers ─► pinned memory ─► device ─► graph of the bucket, or the model's own launches ─► logits
                                                                                └─► one flag: are all rows finite?

Steps that only decode are replayed from the graph of the next larger bucket of rows; steps with prompts, and those that
no bucket holds, are launched piece by piece. The flag comes back while tokens are drawn, and is read when they are
there.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from motet.engines.native.attention.attention_plan import Ints
from motet.engines.native.cuda.launch import CudaStep, Operators, StepScratch, views
from motet.engines.native.cuda.layers import fuse
from motet.engines.native.cuda.work import (
    NARROW,
    WIDE,
    Geometry,
    Sections,
    bucket_lengths,
    buckets,
    fill,
    most_parts,
    places,
    plan_work,
)
from motet.engines.native.kv.pool import blocks_for
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.step.inputs import NonFiniteRowsError, StepInputs
from motet.engines.native.step.run import Backend
from motet.settings.server_config import EngineConfig

Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]
"""Records work on memory that stays where it is; returns a function that does the work again."""


def cuda_graphs() -> Record:
    """Returns a function that records the launches of a decode step, to replay them as one.

    A decode step of a model of 32 layers is some thousand launches of a few microseconds each, and Python takes longer
    to ask for one than the device to do it. A replay asks once. It repeats the recorded work on the same addresses, so
    all that differs from step to step is in memory at a fixed place (`work.Sections`).

    All graphs share the memory for values in between: only one runs at a time, and its results are written elsewhere.
    """
    gc.collect()  # once, and not as `torch.cuda.graph` does before every recording, which takes most of its time
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(work: Callable[[], None]) -> Replay:
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            work()  # at first use kernels are compiled and loaded and libraries take their memory: not while recording
            torch.cuda.synchronize()
            graph.capture_begin(pool=pool)
            work()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    return record


@dataclass(frozen=True)
class _Graphs:
    """The graphs of all buckets, and the memory they share: what one step wrote, the next overwrites."""

    memory: torch.Tensor
    scratch: StepScratch
    logits: torch.Tensor
    buckets: list[tuple[Sections[int], Replay]]
    """For steps whose sections fit into these lengths; small ones first."""

    def bucket_for(self, lengths: Sections[int]) -> tuple[Sections[int], Replay] | None:
        for bucket in self.buckets:
            if all(room >= needed for room, needed in zip(bucket[0], lengths, strict=True)):
                return bucket
        return None


class CudaRunner:
    """A model whose layers are `fuse`d, and the KV memory it reads and writes; see `step.run.ModelRunner`."""

    def __init__(
        self,
        model: PreTrainedModel,
        storage: KVStorage,
        *,
        geometry: Geometry,
        record: Record | None,
        max_rows: int,
        max_tables: int,
    ) -> None:
        """Records graphs for steps that decode up to `max_rows` rows with `max_tables` block ids. If `record` is None,
        every step is launched piece by piece."""
        self.storage = storage
        self.device = storage.keys.device
        self.copy_slots = storage.copy
        self.trunk_tokens_joined = 0
        self.model = model
        self._geometry = geometry
        self._pinned = self.device.type == "cuda"
        self._non_finite = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=self._pinned)
        self._flag_is_here = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        lengths = [bucket_lengths(rows, geometry, tables=max_tables) for rows in buckets(max_rows)]
        self._graphs = None if record is None else self._recorded(record, lengths)

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Returns logits [rows wanted, vocab_size] in the model's dtype, valid until the next run."""
        work = plan_work(inputs, self._geometry)
        step, self.trunk_tokens_joined = work.ints, work.trunk_tokens_joined
        lengths, graphs = Sections(*map(len, step)), self._graphs
        if graphs is not None and not inputs.attention.prompts and (bucket := graphs.bucket_for(lengths)) is not None:
            room, replay = bucket
            self._send(fill(step, room), graphs.memory)
            replay()
            logits, self._non_finite = graphs.logits, graphs.scratch.non_finite
        else:
            memory = torch.empty(places(lengths).tables.stop, dtype=torch.int32, device=self.device)
            self._send(fill(step, lengths), memory)
            parts = int(step.first_part[-1])
            scratch = StepScratch.empty(lengths.slots, parts, storage=self.storage, geometry=self._geometry)
            logits, self._non_finite = self._forward(views(memory, lengths), scratch), scratch.non_finite
        self._flag.copy_(self._non_finite.amax(0, keepdim=True), non_blocking=self._pinned)
        if self._flag_is_here is not None:
            self._flag_is_here.record()
        return logits[: inputs.num_logits]

    def verify(self) -> None:
        """Raises NonFiniteRowsError if a row of the last run is not finite."""
        if self._flag_is_here is not None:
            self._flag_is_here.synchronize()
        if self._flag[0]:
            raise NonFiniteRowsError(self._non_finite.nonzero().flatten().tolist())

    def settle(self) -> None:
        """Waits until the GPU has done all that was launched."""
        if self._pinned:
            torch.cuda.synchronize(self.device)

    def _send(self, ints: Ints, memory: torch.Tensor) -> None:
        """Copies a step's integers to the beginning of `memory` without waiting; see `sample.lanes.uploaded`."""
        host = torch.from_numpy(ints)
        memory[: len(ints)].copy_(host.pin_memory() if self._pinned else host, non_blocking=self._pinned)

    @torch.inference_mode()
    def _recorded(self, record: Record, lengths: list[Sections[int]]) -> _Graphs:
        """Records large buckets first: the memory between the layers of the largest holds that of the others."""
        most = lengths[-1]
        memory = torch.zeros(places(most).tables.stop, dtype=torch.int32, device=self.device)
        parts = most_parts(most, self._geometry)
        scratch = StepScratch.empty(most.slots, parts, storage=self.storage, geometry=self._geometry)
        no_step = Sections(*(np.zeros(count, np.int32) for count in (0, 0, 0, 0, 1, 0, 0, 0, 0)))  # [0]: no parts
        self._send(fill(no_step, most), memory)
        logits = torch.empty_like(self._forward(views(memory, most), scratch))
        graphs = _Graphs(memory, scratch, logits, [])
        for room in reversed(lengths):
            self._send(fill(no_step, room), memory)
            graphs.buckets.insert(0, (room, record(partial(self._forward_into, graphs, views(memory, room)))))
        return graphs

    def _forward_into(self, graphs: _Graphs, ints: Sections[torch.Tensor]) -> None:
        found = self._forward(ints, graphs.scratch)
        graphs.logits[: len(found)].copy_(found)

    def _forward(self, ints: Sections[torch.Tensor], scratch: StepScratch) -> torch.Tensor:
        scratch.non_finite.zero_()
        output = self.model(
            input_ids=ints.token_ids.unsqueeze(0),
            position_ids=ints.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=ints.logit_rows,
            step=CudaStep(ints, scratch, self.storage, self._geometry),
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def cuda_backend(
    model: PreTrainedModel, storage: KVStorage, *, config: EngineConfig, max_model_len: int, share_trunks: bool = True
) -> Backend:
    """Returns the backend for a GPU. It records the graphs, which takes seconds. Equal bits are not promised: the
    library for matrix products chooses its method by the number of rows, so a row's bits depend on the other rows."""
    device, dtype = storage.keys.device, storage.keys.dtype
    torch.cuda.set_device(device)  # Triton and graphs use the current one
    geometry = Geometry(
        num_heads=model.config.num_attention_heads,
        num_kv_heads=storage.keys.shape[2],
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        block_size=storage.block_size,
        widest=NARROW if dtype is torch.float32 else WIDE,
        share_trunks=share_trunks,
    )
    weights = fuse(model, Operators())
    runner = CudaRunner(
        model,
        storage,
        geometry=geometry,
        record=None if config.enforce_eager else cuda_graphs(),
        max_rows=config.max_num_seqs,
        max_tables=config.max_num_seqs * (blocks_for(max_model_len, storage.block_size) + 2),
    )
    return Backend(runner, f"torch-{torch.__version__}", same=False, weights=weights)

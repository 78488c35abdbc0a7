"""Runs the model on a GPU: each step has one copy to the device and one graph launch if a graph fits, and the host does
not wait until it reads the tokens.

    inputs ─► work ─► integers ─► pinned memory ─► device ─► graph of the bucket, or launches of the model ─► logits
                                                                                └─► one flag: are all rows finite?

Steps that only decode replay the graph of the next larger bucket of rows. Steps with prompts, and steps that fit into
no bucket, are launched operator by operator. The flag is copied to the host while tokens are sampled, and is read after
the tokens."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import ge

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from motet.engines.native.attention.attention_plan import Ints
from motet.engines.native.cpu.model_reader import read_structure
from motet.engines.native.cuda import work
from motet.engines.native.cuda.launch import CudaStep, Operators, StepScratch, views
from motet.engines.native.cuda.layers import fuse
from motet.engines.native.kv.pool import blocks_for
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.step.inputs import NonFiniteRowsError, StepInputs
from motet.engines.native.step.run import Backend
from motet.settings.engine_config import EngineConfig

Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]
"""Records work on memory at fixed addresses. Returns a function that repeats the work."""


def cuda_graphs() -> Record:
    """Returns a function that records the launches of a decode step as a CUDA graph.

    A decode step of a model with 32 layers has about a thousand launches of a few microseconds each, and Python needs
    longer for a launch than the device for its work. A replay is one launch. It repeats the recorded work at the same
    addresses, so everything that differs between steps is in memory at a fixed address (`work.Sections`). All graphs
    share the memory of intermediate values: only one graph runs at a time, and its results are copied elsewhere."""
    gc.collect()  # once; `torch.cuda.graph` does it before every recording, which takes most of the recording time
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(launches: Callable[[], None]) -> Replay:
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            launches()  # compiles and loads kernels and lets libraries allocate, which is not possible while recording
            torch.cuda.synchronize()
            graph.capture_begin(pool=pool)
            launches()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    return record


@dataclass(frozen=True)
class _Graphs:
    """The graphs of all buckets, and the memory that they share. A step overwrites the results of the previous one."""

    memory: Tensor
    scratch: StepScratch
    logits: Tensor
    buckets: list[tuple[work.Sections[int], Replay]]
    """Graphs by the section lengths that they have capacity for, by ascending size."""

    def bucket_for(self, lengths: work.Sections[int]) -> tuple[work.Sections[int], Replay] | None:
        """Returns the smallest bucket that has capacity for sections of these lengths, or None."""
        return next((bucket for bucket in self.buckets if all(map(ge, bucket[0], lengths))), None)


class CudaRunner:
    """`ModelRunner` of a model whose layers were replaced by `fuse`. Owns the graphs and their memory."""

    def __init__(
        self,
        model: PreTrainedModel,
        storage: KVStorage,
        *,
        geometry: work.Geometry,
        record: Record | None,
        max_rows: int,
        max_tables: int,
    ) -> None:
        """Records graphs for steps that decode up to `max_rows` rows with up to `max_tables` block ids. If `record` is
        None, every step is launched operator by operator."""
        self.storage = storage
        self.device = storage.keys.device
        self.copy_slots = storage.copy
        self.trunk_tokens_saved = 0
        self.model = model
        self._geometry = geometry
        self._pinned = self.device.type == "cuda"
        self._non_finite = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=self._pinned)
        self._flag_copied = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        lengths = [work.bucket_lengths(rows, geometry, tables=max_tables) for rows in work.buckets(max_rows)]
        self._graphs = None if record is None else self._recorded(record, lengths)

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> Tensor:
        """Returns logits [num_logits, vocab_size] in the model's dtype, on the device; valid until the next run."""
        planned = work.plan_work(inputs, self._geometry)
        step, self.trunk_tokens_saved = planned.ints, planned.trunk_tokens_saved
        lengths, graphs = work.Sections(*map(len, step)), self._graphs
        if graphs is not None and not inputs.attention.prompts and (bucket := graphs.bucket_for(lengths)) is not None:
            capacity, replay = bucket
            self._send(work.fill(step, capacity), graphs.memory)
            replay()
            logits, self._non_finite = graphs.logits, graphs.scratch.non_finite
        else:
            memory = torch.empty(work.places(lengths).tables.stop, dtype=torch.int32, device=self.device)
            self._send(work.fill(step, lengths), memory)
            parts = int(step.first_part[-1])
            scratch = StepScratch.empty(lengths.slots, parts, storage=self.storage, geometry=self._geometry)
            logits, self._non_finite = self._forward(views(memory, lengths), scratch), scratch.non_finite
        self._flag.copy_(self._non_finite.amax(0, keepdim=True), non_blocking=self._pinned)
        if self._flag_copied is not None:
            self._flag_copied.record()
        return logits[: inputs.num_logits]

    def verify(self) -> None:
        if self._flag_copied is not None:
            self._flag_copied.synchronize()
        if self._flag[0]:
            raise NonFiniteRowsError(self._non_finite.nonzero().flatten().tolist())

    def settle(self) -> None:
        if self._pinned:
            torch.cuda.synchronize(self.device)

    def _send(self, ints: Ints, memory: Tensor) -> None:
        """Copies a step's integers [n] int32 to the start of `memory` without waiting (`sample.lanes.uploaded`)."""
        host = torch.from_numpy(ints)
        memory[: len(ints)].copy_(host.pin_memory() if self._pinned else host, non_blocking=self._pinned)

    @torch.inference_mode()
    def _recorded(self, record: Record, lengths: list[work.Sections[int]]) -> _Graphs:
        """Records the graphs of all buckets, the largest first, because its memory of intermediate values also suffices
        for the smaller buckets."""
        largest = lengths[-1]
        memory = torch.zeros(work.places(largest).tables.stop, dtype=torch.int32, device=self.device)
        parts = work.max_parts(largest, self._geometry)
        scratch = StepScratch.empty(largest.slots, parts, storage=self.storage, geometry=self._geometry)
        no_step = work.Sections(
            *(np.zeros(count, np.int32) for count in (0, 0, 0, 0, 1, 0, 0, 0, 0))
        )  # first_part is [0]
        self._send(work.fill(no_step, largest), memory)
        logits = torch.empty_like(self._forward(views(memory, largest), scratch))
        graphs = _Graphs(memory, scratch, logits, [])
        for capacity in reversed(lengths):
            self._send(work.fill(no_step, capacity), memory)
            graphs.buckets.insert(0, (capacity, record(partial(self._forward_into, graphs, views(memory, capacity)))))
        return graphs

    def _forward_into(self, graphs: _Graphs, ints: work.Sections[Tensor]) -> None:
        logits = self._forward(ints, graphs.scratch)
        graphs.logits[: len(logits)].copy_(logits)

    def _forward(self, ints: work.Sections[Tensor], scratch: StepScratch) -> Tensor:
        scratch.non_finite.zero_()
        output = self.model(
            input_ids=ints.token_ids.unsqueeze(0),
            position_ids=ints.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=ints.logit_rows,
            step=CudaStep(ints, scratch, self.storage, self._geometry),
        )
        logits: Tensor = output.logits[0]
        return logits


def cuda_backend(
    model: PreTrainedModel, storage: KVStorage, *, config: EngineConfig, max_model_len: int, share_trunks: bool = True
) -> Backend:
    """Returns the backend for a GPU. Records the graphs, which takes seconds. Does not promise equal bits: the library
    of matrix products selects its algorithm by the number of rows, so a row's bits depend on the rest of the batch.
    Raises StructureError, without a change of the model, if there are no kernels for it."""
    device, dtype = storage.keys.device, storage.keys.dtype
    torch.cuda.set_device(device)  # Triton and graphs use the current device
    geometry = work.Geometry(
        num_heads=model.config.num_attention_heads,
        num_kv_heads=storage.keys.shape[2],
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        block_size=storage.block_size,
        widest=work.NARROW if dtype is torch.float32 else work.WIDE,
        share_trunks=share_trunks,
    )
    weights = fuse(model, Operators(), structure=read_structure(model, max_positions=max_model_len))
    runner = CudaRunner(
        model,
        storage,
        geometry=geometry,
        record=None if config.enforce_eager else cuda_graphs(),
        max_rows=config.max_num_seqs,
        max_tables=config.max_num_seqs * (blocks_for(max_model_len, storage.block_size) + 2),
    )
    return Backend(runner, f"torch-{torch.__version__}", same=False, weights=weights, kernels="cuda")

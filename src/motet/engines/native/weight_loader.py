"""Reads checkpoints for a running engine.

    checkpoint ─► names, shapes and dtypes are checked
                     ├─► every tensor is written to separate memory ─────┬─► between two steps: the weights are applied
                     └─► the digest is computed in a thread of its own ──┘

The weights that serve do not change before the complete checkpoint has been read, so a failure has no effect on them.
Until then memory contains both the old and the new weights.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import msgspec
import torch
from torch import nn

from motet.engine_info import EngineInfo
from motet.engine_orders import Checksums, OrderAnswer, PreparedWeights, PrepareWeights, SumWeights
from motet.engines.native.checks.fingerprint import MODEL_DIGITS
from motet.engines.native.model import is_unused
from motet.engines.native.model_weights import (
    NOT_FINITE,
    SAVED_DTYPES,
    ModelWeights,
    PublishedForm,
    StagedWeights,
    is_finite,
    saved_tensors,
)
from motet.engines.native.quantized.dequantized import DequantizedCheckpoint
from motet.engines.native.quantized.detect import format_of
from motet.engines.native.quantized.stored_tensors import LogicalTensor, plain_tensors
from motet.engines.wire import INVALID_WEIGHTS
from motet.errors import EngineError, MotetError, RequestError, StartupError
from motet.models.checkpoint import CheckpointKind, checkpoint_files
from motet.models.file_reading import AHEAD, FileReading
from motet.models.safetensors_header import ITEM_BYTES
from motet.models.weight_digest import read_headers, start_weights_digest, weights_digest
from motet.transfer.mailbox import Mailbox

logger = logging.getLogger(__name__)

ZEROS = hashlib.sha256(b"zeros").hexdigest()
"""The digest of weights that are all zeros."""


@dataclass(frozen=True)
class LoadedWeights:
    """Prepared weights, with the memory that holds them."""

    staged: StagedWeights
    prepared: PreparedWeights
    of_start: bool = False
    """True if these are the weights with which the engine was started."""


@dataclass(frozen=True)
class StartWeights:
    """The weights with which the engine was started."""

    folder: Path
    digest: str
    load: Callable[[], nn.Module]
    """Loads the model again. Raises StartupError subclasses."""


class WeightLoader:
    """Reads weights for an engine, and stores the digest of the weights that serve."""

    def __init__(
        self,
        live: ModelWeights,
        start: StartWeights,
        *,
        name_of: Callable[[str], str],
        cache: Path,
        published: PublishedForm,
    ) -> None:
        """`start`: the weights that serve now. `name_of`: computes the digest of the model from the digest of its
        weights. `cache`: the folder in which digests of large files are cached. `published`: how checkpoints of the
        model differ from it."""
        self._live = live
        self._start = start
        self._digest = start.digest
        self._name_of = name_of
        self._cache = cache
        self._published = published
        self._released = False
        """True while the memory of the weights is released."""

    def over(self, live: ModelWeights) -> "WeightLoader":
        """Returns a loader for a model that has the same weights in other memory."""
        return WeightLoader(live, self._start, name_of=self._name_of, cache=self._cache, published=self._published)

    def prepare(self, kind: CheckpointKind, paths: Sequence[Path] = (), *, base: str = "") -> LoadedWeights:
        """Reads a checkpoint. `base`: see `PrepareWeights`. Raises RequestError, which names the tensor or the file, if
        the checkpoint cannot be used, and EngineError if the weights with which the engine was started do not exist any
        more."""
        started_s = time.monotonic()
        match kind:
            case CheckpointKind.START:
                staged, tensors, digest = *self._read_start(), self._start.digest
            case CheckpointKind.ZEROS:
                staged, tensors, digest = *self._make_zeros(), ZEROS
            case CheckpointKind.FILES | CheckpointKind.MEMORY:
                cache = self._cache if kind is CheckpointKind.FILES else None
                return self._read_files(paths, started_s, cache=cache, base=base or self._digest)
        prepared = PreparedWeights(tensors, time.monotonic() - started_s, complete=True, digest=digest)
        return LoadedWeights(staged, prepared, of_start=kind is CheckpointKind.START)

    def _read_files(self, paths: Sequence[Path], started_s: float, *, cache: Path | None, base: str) -> LoadedWeights:
        """Reads safetensors files, or folders of such files, with all tensors of the model or some of them."""
        reading = FileReading()
        try:
            known = self._live.shapes.keys() | self._published.parts.keys()
            stored = reading.run(lambda: read_checkpoint(paths, reading, names=known))
            checkpoint = {name: one for name, one in stored.items() if name in known or not self._unused(name, stored)}
            names = check_tensors(checkpoint, self._live, published=self._published)
            missing = missing_names(names, self._live)
            needed = missing - self._published.buffers
            if needed and self._released:
                raise unusable(
                    min(needed), "it is missing, and the old weights are released: POST /wake_up?tags=weights"
                )
            digesting = start_weights_digest(paths, cache, reading=reading)
            staged = self._live.stage(complete=not needed)
            read = _tensors(checkpoint, reading, dtype_of=self._dtype_of, tied=self._live.tied)
            with closing(reading.ahead(read)) as tensors:
                rounded = ((name, self._rounded(name, tensor)) for name, tensor in tensors)
                for name, tensor in self._published.merged(rounded, self._live.shapes):
                    staged.write(name, tensor)
            digest = reading.wait_for(digesting)
        except (StartupError, OSError) as error:
            raise RequestError(str(error), code=INVALID_WEIGHTS) from error
        finally:
            reading.close()
        if missing:  # the missing tensors keep their old values, so the digest depends on the old weights too
            digest = hashlib.sha256(f"{base}|{digest}".encode()).hexdigest()
        prepared = PreparedWeights(
            len(names),
            time.monotonic() - started_s,
            complete=not missing,
            digest=digest,
            names=tuple(sorted(names)) if missing else (),
        )
        return LoadedWeights(staged, prepared)

    def _rounded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Rounds a tensor to the engine's dtype. Raises RequestError if a number is not finite."""
        rounded = tensor.to(dtype := self._dtype_of(name))
        if is_finite(rounded):
            return rounded
        too_large = f"it has numbers that are too large for {str(dtype).removeprefix('torch.')}"
        raise unusable(name, too_large if is_finite(tensor) else NOT_FINITE)

    def _unused(self, name: str, stored: Mapping[str, LogicalTensor]) -> bool:
        unused = self._published.unused
        return is_unused(name, stored) or (unused is not None and unused.search(name) is not None)

    def _dtype_of(self, name: str) -> torch.dtype:
        part = self._published.parts.get(name)
        return self._live.dtype_of(name if part is None else part.whole)

    def _make_zeros(self) -> tuple[StagedWeights, int]:
        staged = self._live.stage(complete=True)
        for name, shape in self._live.shapes.items():
            staged.write(name, torch.zeros(shape))
        return staged, len(self._live.shapes)

    def _read_start(self) -> tuple[StagedWeights, int]:
        start, reading = self._start, FileReading()
        try:
            if reading.run(lambda: weights_digest([start.folder], self._cache, reading=reading)) != start.digest:
                raise EngineError(f"{start.folder} does not contain the weights of the start any more")
            reading.run(lambda: _read_through(start.folder, reading))
            staged = self._live.stage(complete=True)
            tensors = saved_tensors(start.load())
        except StartupError as error:
            raise EngineError(f"the weights of the start cannot be read again: {error.message}") from error
        for name, tensor in tensors.items():
            staged.write(name, tensor)
        return staged, len(tensors)

    def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of the engine's form of each tensor of a checkpoint."""
        sums = {}
        for name in self._live.shapes:
            digest = hashlib.sha256()
            for numbers in self._live.numbers(name):
                digest.update(numbers.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            sums[name] = digest.hexdigest()
        return sums

    def release_pages(self) -> None:
        """Releases the memory of the weights. A complete checkpoint must be applied before the next step."""
        self._live.release_pages()
        self._released = True

    def applied(self, loaded: LoadedWeights, info: EngineInfo, *, version: str) -> EngineInfo:
        """Records that these weights serve from now on. Returns the engine's new facts."""
        self._digest, self._released = loaded.prepared.digest, False
        model = self._name_of(self._digest)
        return msgspec.structs.replace(
            info,
            model_digest=model,
            weight_version=version,
            block_weights="" if loaded.of_start else model,
            fingerprint=info.fingerprint.replace(info.model_digest[:MODEL_DIGITS], model[:MODEL_DIGITS]),
        )


class WeightThreads:
    """Carries out orders about weights in threads, while the engine takes steps. Only the engine loop calls it."""

    def __init__(self, loader: WeightLoader) -> None:
        self.loader = loader
        self._number: int | None = None
        """Number of the last order to prepare weights. The results of earlier orders are dropped."""
        self._loaded: LoadedWeights | None = None
        self._done = Mailbox[tuple[int, LoadedWeights | Checksums | MotetError]]()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `take` has something to return."""
        return self._done.fileno()

    def start(self, number: int, order: PrepareWeights | SumWeights) -> None:
        """Starts to carry out an order. `take` returns its answer later."""
        if isinstance(order, PrepareWeights):
            self.drop()
            self._number = number
        threading.Thread(target=self._work, args=(number, order), name="weights", daemon=True).start()

    def take(self) -> list[tuple[int, OrderAnswer | MotetError]]:
        """Returns the answers to orders that have been carried out, by their numbers."""
        answers: list[tuple[int, OrderAnswer | MotetError]] = []
        for number, done in self._done.take():
            if isinstance(done, LoadedWeights):
                if number == self._number:
                    self._loaded = done
                answers.append((number, done.prepared))
            else:
                answers.append((number, done))
        return answers

    def take_loaded(self, digest: str = "") -> LoadedWeights:
        """Returns the prepared weights, once. Raises EngineError if there are none, or none with the given digest."""
        loaded = self._loaded
        if loaded is None or digest not in ("", loaded.prepared.digest):
            raise EngineError("no new weights are prepared")
        self._loaded = None
        return loaded

    def drop(self, digest: str = "") -> None:
        """Drops the prepared weights, and weights that are being read, unless the given digest names other weights."""
        if not digest or self._loaded is None or self._loaded.prepared.digest == digest:
            self._number = self._loaded = None

    def close(self) -> None:
        self.drop()
        self._done.close()

    def _work(self, number: int, order: PrepareWeights | SumWeights) -> None:
        try:
            if isinstance(order, SumWeights):
                self._done.put((number, Checksums(self.loader.checksums())))
            else:
                self._done.put((number, self.loader.prepare(order.kind, [*map(Path, order.paths)], base=order.base)))
        except MotetError as error:
            self._done.put((number, error))
        except Exception as error:  # for instance without memory: the old weights continue to serve
            logger.exception("the order %s failed", type(order).__name__)
            self._done.put((number, EngineError(f"the order {type(order).__name__} failed: {error!r}")))


def read_checkpoint(paths: Sequence[Path], reading: FileReading, *, names: Collection[str]) -> dict[str, LogicalTensor]:
    """Returns the tensors of safetensors files, or of folders of such files, by name. A folder can have a quantized
    checkpoint. `names`: the tensors that checkpoints of the model can have. Raises ModelLoadError, and
    UnsupportedModelError for a format of quantized weights that is not supported."""
    found: dict[str, LogicalTensor] = {}
    for path in paths:
        form, headers = format_of(path), read_headers([path], reading)
        if form is not None:
            tensors = DequantizedCheckpoint.of(form, headers).without_zero_biases(names).tensors
        else:
            tensors = plain_tensors(headers)
        for name, tensor in tensors.items():
            if name in found:
                raise unusable(name, "it is in two files")
            found[name] = tensor
    return found


def check_tensors(checkpoint: Mapping[str, LogicalTensor], live: ModelWeights, *, published: PublishedForm) -> set[str]:
    """Returns the names of the model's tensors in a checkpoint. Raises RequestError for the first tensor that the model
    does not have, or has in another shape, or whose dtype is not in `ITEM_BYTES`, and for an incomplete tensor of the
    model."""
    for name, tensor in checkpoint.items():
        part = published.parts.get(name)
        expected = live.shapes.get(name) if part is None else part.shape
        if expected is None:
            raise unusable(name, f"the model has no such tensor ({tensor.file.name})")
        if tensor.shape != expected:
            raise unusable(name, f"its shape is {list(tensor.shape)}, and the model's is {list(expected)}")
        if tensor.dequantize is None and (dtype := tensor.parts[""].dtype) not in ITEM_BYTES:
            raise unusable(name, f"its dtype is {dtype}; {', '.join(ITEM_BYTES)} can be used")
    if not checkpoint:
        raise RequestError("the checkpoint has no tensors", code=INVALID_WEIGHTS)
    for whole in sorted({published.parts[name].whole for name in checkpoint if name in published.parts}):
        if whole in checkpoint:
            raise unusable(whole, "parts of it are in the checkpoint too")
        if missing := published.missing_parts(checkpoint, whole):
            raise unusable(missing[0], f"it is missing, and other parts of {whole} are in the checkpoint")
    return published.whole_names(checkpoint)


def missing_names(names: set[str], live: ModelWeights) -> set[str]:
    """Returns the names of the model's tensors that are not in `names`. One name of a tied tensor is enough."""
    given = names.union(*(several for several in live.tied if names.intersection(several)))
    return live.shapes.keys() - given


def _tensors(
    checkpoint: Mapping[str, LogicalTensor],
    reading: FileReading,
    *,
    dtype_of: Callable[[str], torch.dtype],
    tied: list[list[str]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all tensors of the files. A tensor is valid until the next one is requested, because its memory is used
    again. Raises RequestError if two names of a tied tensor have different numbers."""
    plain = (tensor.parts[""].num_bytes for tensor in checkpoint.values() if tensor.dequantize is None)
    largest = max(plain, default=0)
    memory = cycle([torch.empty(largest, dtype=torch.uint8) for _ in range(AHEAD + 1)])  # new memory costs more time

    def read(name: str, memory: torch.Tensor) -> torch.Tensor:
        if checkpoint[name].dequantize is not None:
            return checkpoint[name].read(reading, dtype_of(name))
        stored = checkpoint[name].parts[""]
        numbers = memory[: stored.num_bytes]
        reading.read_into(numbers.numpy().data, stored.file, begin=stored.begin)
        return numbers.view(SAVED_DTYPES[stored.dtype]).view(stored.shape)

    twins = {name: several[0] for several in tied for name in several[1:] if several[0] in checkpoint}
    for name in checkpoint:
        tensor = read(name, next(memory))
        if (first := twins.get(name)) is not None:
            other = read(first, torch.empty(largest, dtype=torch.uint8))
            if tensor.dtype != other.dtype or not torch.equal(tensor, other):
                raise unusable(name, f"it is tied to {first}, and has other numbers")
            continue
        yield name, tensor


def _read_through(folder: Path, reading: FileReading) -> None:
    """Reads all weights once with `FileReading`. The model's own loader, which would wait for ever if a read hangs,
    then finds them in the system's page cache."""
    for file in checkpoint_files([folder]):
        for _ in reading.pieces(file, begin=0, end=file.stat().st_size):
            pass


def unusable(name: str, why: str) -> RequestError:
    return RequestError(f"tensor {name}: {why}", code=INVALID_WEIGHTS)

"""New weights for a running engine.

    checkpoint ─► names, shapes and dtypes are checked
                     ├─► every tensor is written beside the old weights ─┬─► between two steps: they take their place
                     └─► digest, in a thread of its own ─────────────────┘

Nothing that serves is touched until all of it has been read, so whatever fails leaves the old weights as they are.
Memory holds both until then.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from motet.engine import PreparedWeights
from motet.engines.native.fingerprint import MODEL_DIGITS
from motet.engines.native.memory import release_pages
from motet.engines.native.protocol import Checksums, PrepareWeights, WeightsPrepared
from motet.engines.wire import INVALID_WEIGHTS, CarriedError
from motet.errors import EngineError, ModelLoadError, MotetError, RequestError, StartupError
from motet.models.checkpoint import CheckpointKind, checkpoint_files
from motet.models.folder import check_safetensors
from motet.models.weights import begin_weights_digest, weights_digest
from motet.transfer.mailbox import Mailbox
from motet.types import EngineInfo

logger = logging.getLogger(__name__)

DTYPES = ("BF16", "F16", "F32")
"""Dtypes of tensors that may be written, as safetensors names them; they are rounded to the engine's own."""


ZEROS = hashlib.sha256(b"zeros").hexdigest()
"""The digest of weights that are all zeros."""


class NewWeights(Protocol):
    """Weights that are being written, and do not serve yet."""

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor of the checkpoint, of the right shape, in any dtype and on any device."""
        ...

    def apply(self) -> None:
        """Puts them in the place of the old ones. Called once, between two steps. It does not fail."""
        ...


class LiveWeights(Protocol):
    """The weights of a model that serves."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by its name in a checkpoint. Tied weights have two names."""
        ...

    @property
    def tied(self) -> list[list[str]]:
        """The names of each tensor that has more than one."""
        ...

    def begin(self, *, whole: bool) -> NewWeights:
        """Returns new weights that begin as a copy of those that serve, or with anything if the `whole` of them will be
        written."""
        ...

    def numbers(self, name: str) -> list[torch.Tensor]:
        """Returns what the engine has in place of a tensor of the checkpoint: the tensor in its own dtype, or what it
        computes with (int8 and scales; the factors of a norm)."""
        ...

    def forget(self) -> None:
        """Gives their memory back to the system. Before the next run new ones must be applied, all tensors of them."""
        ...


@dataclass(frozen=True)
class Slot:
    """A tensor of the running model, or a part of one, which a tensor of the checkpoint fills."""

    numbers: torch.Tensor
    more: float = 0.0
    """What is added to the checkpoint's numbers."""


class TensorWeights:
    """Weights that torch's operators or the GPU's kernels read. They stay where they are, as recorded graphs know their
    addresses: new ones wait on the device and are copied over them."""

    def __init__(self, slots: Mapping[str, Slot], *, tied: list[list[str]], dtype: torch.dtype) -> None:
        """`dtype`: that in which the model's own loader reads a checkpoint."""
        self._slots = slots
        self._dtype = dtype
        self.shapes = {name: tuple(slot.numbers.shape) for name, slot in slots.items()}
        self.tied = tied

    @classmethod
    def of(cls, model: nn.Module) -> "TensorWeights":
        """Returns the weights of a model whose parameters are those of the checkpoint."""
        slots = {name: Slot(one.detach()) for name, one in model.named_parameters(remove_duplicate=False)}
        return cls(slots, tied=tied_names(names_of(model)), dtype=next(model.parameters()).dtype)

    def begin(self, *, whole: bool) -> "NewTensors":
        return NewTensors(self._slots, self._dtype)

    def numbers(self, name: str) -> list[torch.Tensor]:
        return [self._slots[name].numbers]

    def forget(self) -> None:
        for slot in self._slots.values():
            release_pages(slot.numbers)


class NewTensors:
    def __init__(self, slots: Mapping[str, Slot], dtype: torch.dtype) -> None:
        self._slots = slots
        self._dtype = dtype
        self._written: list[tuple[Slot, torch.Tensor]] = []

    def write(self, name: str, tensor: torch.Tensor) -> None:
        slot = self._slots[name]
        rounded = tensor.to(slot.numbers.device, self._dtype, copy=True).to(slot.numbers.dtype)
        self._written.append((slot, rounded + slot.more if slot.more else rounded))

    @torch.no_grad()
    def apply(self) -> None:
        for slot, tensor in self._written:
            slot.numbers.copy_(tensor)


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each parameter in a checkpoint, by the parameter's id; a tied one has two."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def tied_names(names: Mapping[int, list[str]]) -> list[list[str]]:
    return [several for several in names.values() if len(several) > 1]


@dataclass(frozen=True)
class Prepared:
    """New weights that have been read whole, and wait to be applied."""

    weights: NewWeights
    facts: PreparedWeights
    first: bool = False
    """True if they are those of the start."""


def _prepared(new: NewWeights, *, tensors: int, begun_s: float, whole: bool, digest: str) -> Prepared:
    return Prepared(new, PreparedWeights(tensors, time.monotonic() - begun_s, whole, digest))


@dataclass(frozen=True)
class FirstWeights:
    """The weights with which the engine was started."""

    folder: Path
    digest: str
    load: Callable[[], nn.Module]
    """Loads the model again. Raises StartupError subclasses."""


class Renewal:
    """Brings an engine new weights, in two steps: `prepare` reads them while it serves, `applied` tells what it is with
    them."""

    def __init__(self, live: LiveWeights, first: FirstWeights, *, name_of: Callable[[str], str], cache: Path) -> None:
        """`first`: the weights that serve. `name_of` makes the model's digest of that of its weights. `cache`: the
        folder that keeps digests of large files."""
        self._live = live
        self._first = first
        self._digest = first.digest
        self._name_of = name_of
        self._cache = cache
        self._forgotten = False
        """True while the memory of the weights is given back."""

    def over(self, live: LiveWeights) -> "Renewal":
        """Returns the same for a model with the same weights that has them elsewhere."""
        return Renewal(live, self._first, name_of=self._name_of, cache=self._cache)

    def prepare(self, paths: Sequence[Path], *, keep_digest: bool = True) -> Prepared:
        """Reads new weights from safetensors files, or folders with some: all tensors of the model, or only new ones.
        `keep_digest`: their digest goes into the cache. Raises RequestError, which names the tensor or the file, if
        they cannot be used."""
        begun_s = time.monotonic()
        try:
            headers = {file: check_safetensors(file)[0] for file in checkpoint_files(paths)}
            names = check_tensors(headers, self._live)
            missing = missing_names(names, self._live)
            if missing and self._forgotten:
                raise wrong(min(missing), "it is not there, and the old weights are asleep: POST /wake_up?tags=weights")
            digesting = begin_weights_digest(paths, self._cache if keep_digest else None)
            new = self._live.begin(whole=not missing)
            with ExitStack() as stack:
                for name, tensor in _tensors(stack, headers, tied=self._live.tied):
                    new.write(name, tensor)
            digest = digesting.result()
        except (ModelLoadError, SafetensorError, OSError) as error:
            raise RequestError(str(error), code=INVALID_WEIGHTS) from error
        if missing:  # then they are those of this digest only over the old ones
            digest = hashlib.sha256(f"{self._digest}|{digest}".encode()).hexdigest()
        return _prepared(new, tensors=len(names), begun_s=begun_s, whole=not missing, digest=digest)

    def prepare_zeros(self) -> Prepared:
        """Makes weights that are all zeros."""
        begun_s, new = time.monotonic(), self._live.begin(whole=True)
        for name, shape in self._live.shapes.items():
            new.write(name, torch.zeros(shape))
        return _prepared(new, tensors=len(self._live.shapes), begun_s=begun_s, whole=True, digest=ZEROS)

    def prepare_first(self) -> Prepared:
        """Reads the weights of the start again. Raises EngineError if they are not there any more."""
        begun_s, first = time.monotonic(), self._first
        try:
            if weights_digest([first.folder], self._cache) != first.digest:
                raise EngineError(f"{first.folder} does not hold the weights of the start any more")
            new = self._live.begin(whole=True)
            tensors = dict(first.load().named_parameters(remove_duplicate=False))
        except StartupError as error:
            raise EngineError(f"the weights of the start cannot be read again: {error.message}") from error
        for name, tensor in tensors.items():
            new.write(name, tensor)
        prepared = _prepared(new, tensors=len(tensors), begun_s=begun_s, whole=True, digest=first.digest)
        return replace(prepared, first=True)

    def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of what the engine has in place of each tensor of the checkpoint."""
        sums = {}
        for name in self._live.shapes:
            digest = hashlib.sha256()
            for numbers in self._live.numbers(name):
                digest.update(numbers.detach().cpu().contiguous().view(torch.uint8).numpy().data)
            sums[name] = digest.hexdigest()
        return sums

    def forget(self) -> None:
        """Gives the memory of the weights back. New ones must be applied, all tensors of them, before the next step."""
        self._live.forget()
        self._forgotten = True

    def applied(self, prepared: Prepared, info: EngineInfo, *, version: str) -> EngineInfo:
        """Returns the facts of an engine that has these weights from now on."""
        self._digest, self._forgotten = prepared.facts.digest, False
        model = self._name_of(self._digest)
        return msgspec.structs.replace(
            info,
            model_digest=model,
            weight_version=version,
            block_weights="" if prepared.first else model,
            fingerprint=info.fingerprint.replace(info.model_digest[:MODEL_DIGITS], model[:MODEL_DIGITS]),
        )


class Renewing:
    """Prepares new weights in a thread beside the steps. Owned by the engine loop: all but the reading happens in the
    loop's thread."""

    def __init__(self, renewal: Renewal) -> None:
        self._renewal = renewal
        self._number: int | None = None
        """The order whose result is wanted; those of earlier ones are dropped."""
        self._prepared: Prepared | None = None
        self._done = Mailbox[tuple[int, Prepared | MotetError | dict[str, str]]]()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `take` has something to return."""
        return self._done.fileno()

    def prepare(self, order: PrepareWeights) -> None:
        self.drop()
        self._number = order.number
        threading.Thread(target=self._work, args=(order,), name="weights", daemon=True).start()

    def sum(self, number: int) -> None:
        """Computes checksums. The weights must not be replaced meanwhile."""
        threading.Thread(target=self._sum, args=(number,), name="checksums", daemon=True).start()

    def take(self) -> list[WeightsPrepared | Checksums]:
        """Returns the answers to orders that have been carried out."""
        answers: list[WeightsPrepared | Checksums] = []
        for number, done in self._done.take():
            if isinstance(done, dict):
                answers.append(Checksums(number, done))
                continue
            if isinstance(done, MotetError):
                answers.append(WeightsPrepared(number, None, CarriedError.of(done)))
                continue
            if number == self._number:
                self._prepared = done
            answers.append(WeightsPrepared(number, done.facts))
        return answers

    def prepared(self) -> Prepared | None:
        """Returns the weights that are prepared, once."""
        prepared, self._prepared = self._prepared, None
        return prepared

    def drop(self) -> None:
        self._number = self._prepared = None

    def close(self) -> None:
        self.drop()
        self._done.close()

    def _sum(self, number: int) -> None:
        self._done.put((number, self._renewal.checksums()))

    def _work(self, order: PrepareWeights) -> None:
        done: Prepared | MotetError
        try:
            done = self._prepare(order.kind, [*map(Path, order.paths)])
        except MotetError as error:
            done = error
        except Exception as error:  # for instance without memory: the old weights serve on
            logger.exception("new weights could not be read")
            done = EngineError(f"the new weights could not be read: {error!r}")
        self._done.put((order.number, done))

    def _prepare(self, kind: CheckpointKind, paths: Sequence[Path]) -> Prepared:
        match kind:
            case CheckpointKind.START:
                return self._renewal.prepare_first()
            case CheckpointKind.ZEROS:
                return self._renewal.prepare_zeros()
        return self._renewal.prepare(paths, keep_digest=kind is CheckpointKind.FILES)


def check_tensors(headers: Mapping[Path, Mapping[str, Any]], live: LiveWeights) -> set[str]:
    """Returns the names of the tensors. Raises RequestError for the first that the model has not, or has in another
    shape, or that is no number with a fraction."""
    seen: set[str] = set()
    for file, header in headers.items():
        for name, entry in header.items():
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            wanted = live.shapes.get(name)
            if wanted is None:
                raise wrong(name, f"the model has no such tensor ({file.name})")
            if name in seen:
                raise wrong(name, "it is in two files")
            if shape != wanted:
                raise wrong(name, f"its shape is {list(shape)}, and the model's is {list(wanted)}")
            if dtype not in DTYPES:
                raise wrong(name, f"its dtype is {dtype}; {', '.join(DTYPES)} can be used")
            seen.add(name)
    if not seen:
        raise RequestError("there are no tensors in it", code=INVALID_WEIGHTS)
    return seen


def missing_names(names: set[str], live: LiveWeights) -> set[str]:
    """Returns the names that no tensor was given for; one name of a tied tensor is enough."""
    given = names.union(*(several for several in live.tied if names.intersection(several)))
    return live.shapes.keys() - given


def _tensors(
    stack: ExitStack, headers: Mapping[Path, Mapping[str, Any]], *, tied: list[list[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all tensors of the files. Raises RequestError if two names of a tied tensor have different numbers."""
    file_of = {name: file for file, header in headers.items() for name in header}
    opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in headers}
    twins = {name: several[0] for several in tied for name in several[1:] if several[0] in file_of}
    for name, file in file_of.items():
        tensor = opened[file].get_tensor(name)
        if (first := twins.get(name)) is not None:
            if not torch.equal(tensor, opened[file_of[first]].get_tensor(first)):
                raise wrong(name, f"it is tied to {first}, and has other numbers")
            continue
        yield name, tensor


def wrong(name: str, why: str) -> RequestError:
    return RequestError(f"tensor {name}: {why}", code=INVALID_WEIGHTS)

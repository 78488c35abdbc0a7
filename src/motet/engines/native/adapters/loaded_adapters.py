"""The adapters of an engine, by name."""

from collections.abc import Iterable

from motet.engine_info import AdapterInfo
from motet.engines.native.adapters.low_rank import ServedAdapter
from motet.errors import ModelGoneError, ModelNotFoundError, RequestError
from motet.ids import ModelName


class LoadedAdapters:
    """The adapters that new groups can use. An unloaded adapter counts for `max_adapters` until its last group ends."""

    def __init__(self, base: ModelName, *, max_adapters: int) -> None:
        """`base`: name of the base model."""
        self._base = base
        self._max_adapters = max_adapters
        self._by_name: dict[ModelName, ServedAdapter] = {}

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(adapter.info for adapter in self._by_name.values())

    def of_model(self, model: ModelName) -> ServedAdapter | None:
        """Returns the adapter of this name; None for the base model. Raises ModelGoneError for any other name."""
        if model in ("", self._base):
            return None
        if (adapter := self._by_name.get(model)) is None:
            raise ModelGoneError(f"this engine does not have the model {model!r}")
        return adapter

    def check_free(self, name: ModelName, *, in_place: bool, used: Iterable[ServedAdapter | None]) -> None:
        """Raises RequestError if no adapter of this name can be loaded. `used`: the adapters of all groups."""
        if name in ("", self._base):
            raise RequestError(f"{name!r} is the base model", param="lora_name", code="invalid_value")
        if name in self._by_name:
            if not in_place:
                message = f"the adapter {name!r} is loaded already: set 'load_inplace' to true to replace it"
                raise RequestError(message, param="lora_name", code="adapter_exists")
            return
        unloaded = {adapter for adapter in used if adapter is not None} - {*self._by_name.values()}
        if len(self._by_name) + len(unloaded) >= self._max_adapters:
            running = f", and {len(unloaded)} unloaded ones are still in use" if unloaded else ""
            raise RequestError(
                f"{len(self._by_name)} adapters are loaded{running}; the maximum is {self._max_adapters} "
                "(--max-adapters)",
                param="lora_name",
                code="too_many_adapters",
            )

    def put(self, adapter: ServedAdapter) -> ServedAdapter | None:
        """Adds an adapter. Returns the adapter of the same name that it replaces, if any."""
        old = self._by_name.get(adapter.info.name)
        self._by_name[adapter.info.name] = adapter
        return old

    def remove(self, name: ModelName) -> ServedAdapter:
        """Removes an adapter. Raises ModelNotFoundError if there is no adapter of this name."""
        if (adapter := self._by_name.pop(name, None)) is None:
            raise ModelNotFoundError(f"the adapter {name!r} is not loaded", param="lora_name")
        return adapter


def same_adapter(one: ServedAdapter | None, other: ServedAdapter) -> bool:
    """Returns True if two adapters have the same name and the same digest."""
    return one is not None and (one.info.name, one.info.digest) == (other.info.name, other.info.digest)

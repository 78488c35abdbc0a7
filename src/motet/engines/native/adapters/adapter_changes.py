"""Changes the adapters of an engine between two steps."""

from collections.abc import Callable, Mapping

import msgspec

from motet.engine_info import EngineInfo
from motet.engines.native.adapters.loaded_adapters import same_adapter
from motet.engines.native.adapters.low_rank import ServedAdapter
from motet.engines.native.scheduling.scheduler import Scheduler
from motet.engines.native.step.sequence import Group, GroupMaker
from motet.ids import ModelName, RequestId


class AdapterChanges:
    """Adds, replaces and removes adapters, for the groups of a core."""

    def __init__(
        self,
        groups: Mapping[RequestId, Group],
        *,
        maker: GroupMaker,
        scheduler: Scheduler,
        settle: Callable[[], None],
    ) -> None:
        """`groups`: all groups of the core, by id. `settle`: see `ModelRunner`."""
        self._groups = groups
        self._maker = maker
        self._scheduler = scheduler
        self._settle = settle

    def check(self, name: ModelName, *, in_place: bool) -> None:
        """Raises RequestError if no adapter of this name can be loaded now."""
        used = (group.trunk.adapter for group in self._groups.values())
        self._maker.adapters.check_free(name, in_place=in_place, used=used)

    def load(self, adapter: ServedAdapter, *, in_place: bool) -> EngineInfo:
        """Adds an adapter, or replaces the adapter of the same name: its groups continue with the new one after their
        output tokens, and all their KV is computed again. Returns the new engine info. Raises RequestError if the
        adapter cannot be added."""
        self.check(adapter.info.name, in_place=in_place)
        old = self._maker.adapters.put(adapter)
        if old is not None and not same_adapter(old, adapter):
            self._replace(old, adapter)
        for group in self._groups.values():
            if same_adapter(group.trunk.adapter, adapter):  # it was replaced or unloaded, and is loaded again
                group.trunk.adapter = adapter
        return self._new_info()

    def unload(self, name: ModelName) -> EngineInfo:
        """Removes an adapter. Its groups continue to their end. Returns the new engine info. Raises
        ModelNotFoundError."""
        old = self._maker.adapters.remove(name)
        self._scheduler.kept.release_adapter(old.info.digest)
        return self._new_info()

    def _replace(self, old: ServedAdapter, adapter: ServedAdapter) -> None:
        self._settle()
        groups = [group for group in self._groups.values() if group.trunk.adapter is old]
        self._scheduler.suspend(groups)
        self._scheduler.kept.release_adapter(old.info.digest)
        for group in groups:
            self._maker.rename_blocks(group, adapter)

    def _new_info(self) -> EngineInfo:
        self._maker.info = msgspec.structs.replace(self._maker.info, adapters=self._maker.adapters.infos)
        return self._maker.info

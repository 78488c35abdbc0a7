"""The models that one worker serves."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from motet.ids import ModelName
from motet.types import EngineInfo, ModelCard


@dataclass(frozen=True)
class WorkerModels:
    """The models that a worker serves or, while it is away, the models that it served last. Made by `models_of`."""

    additional: tuple[ModelCard, ...] = ()
    """The models that it serves in addition to its engine's own model."""
    by_name: Mapping[ModelName, ModelCard] = field(default_factory=dict)
    """All its models, its engine's own model first. Empty if the worker has not reported yet what it serves."""

    def has(self, model: str) -> bool:
        """Returns True if the worker serves the model. A group without a model name is for any model."""
        return not model or model in self.by_name

    def may_have(self, model: str) -> bool:
        """Returns True if the worker serves the model, or has not reported yet what it serves."""
        return self.has(model) or not self.by_name


def models_of(additional: Iterable[ModelCard], info: EngineInfo | None) -> WorkerModels:
    """`info`: facts of the worker's engine. None if the worker takes texts, or has not been reached yet."""
    additional = tuple(additional)
    by_name = {card.name: card for card in additional}
    if info is not None:
        by_name = {info.model: ModelCard(name=info.model, max_model_len=info.max_model_len)} | by_name
    return WorkerModels(additional, by_name)

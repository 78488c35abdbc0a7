"""What the members of a fleet serve: the workers for each model, the models, and the makers of tickets."""

from collections.abc import Mapping

from motet.engine import WorkerState
from motet.ids import ModelName
from motet.routing.workers.member import Member
from motet.routing.workers.serving import ModelServing, WorkKind, serving
from motet.types import ModelCard


class Catalog:
    """Answers queries about the members. Results are computed at the first query after a change of a member, and cached
    until the next change."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        """`members`: members by id; their fleet changes them, and then calls `invalidate`."""
        self._members = members
        self._serving: dict[str, ModelServing] = {}
        """Workers by model."""
        self._makers: dict[str, Member] | None = None
        """Members that make tickets, by engine id. None if they are to be computed again."""
        self._models: dict[ModelName, ModelCard] = {}
        self._models_valid = True

    def invalidate(self) -> None:
        """Called when a member has joined, left or changed."""
        self._serving.clear()
        self._makers = None
        self._models_valid = False

    def serving(self, model: str = "") -> ModelServing:
        """Returns the workers that serve the model now. Without a name, returns the workers of all models."""
        cached = self._serving.get(model)
        if cached is not None:
            return cached
        result = serving(self._members.values(), model)
        if not model or model in self.models():  # names that clients invent are not cached
            self._serving[model] = result
        return result

    def ready(self, work: WorkKind, model: str = "") -> tuple[Member, ...]:
        """Returns the workers that may get this work now. Prefill workers generate only if there is no other worker."""
        return self.serving(model).ready(work)

    def texts(self, model: str) -> list[Member]:
        """Returns the members that take texts and may get a request for this model now."""
        members = [member for member in self._members.values() if member.facts.takes_texts]
        return [member for member in members if member.state is WorkerState.READY and member.models.has(model)]

    def models(self) -> Mapping[ModelName, ModelCard]:
        """Returns the models that the members serve, or served when they were last available, in the order in which
        they were first seen, each with the card of the first member that has it. The result is the same object until a
        member changes."""
        if not self._models_valid:
            served: dict[ModelName, ModelCard] = {}
            for member in self._members.values():
                for name, card in member.models.by_name.items():
                    served.setdefault(name, card)
            earlier = [name for name in self._models if name in served]
            self._models = {name: served[name] for name in dict.fromkeys((*earlier, *served))}
            self._models_valid = True
        return self._models

    def only_text(self, model: str) -> bool:
        """Returns True if only members that take texts serve the model."""
        members = [member for member in self._members.values() if model and member.models.has(model)]
        return bool(members) and all(member.facts.takes_texts for member in members)

    def base_of(self, model: str) -> ModelName | None:
        """Returns the base model of the engine that serves this model under another name, or as an adapter."""
        for member in self._members.values():
            if member.worker is not None and model and member.models.has(model):
                return member.worker.engine.info.model
        return None

    def adapter(self, model: ModelName) -> str:
        """Returns the name that distinguishes KV blocks of this model from blocks of its base model. Returns an empty
        name if it has no base model."""
        card = self.models().get(model) if model else None
        return model if card is not None and card.parent is not None else ""

    def maker(self, engine_id: str) -> Member | None:
        """Returns the member that makes tickets with this engine id, or None if no member does."""
        if self._makers is None:
            makers = ((member.facts.engine_id, member) for member in self._members.values())
            self._makers = {id: member for id, member in makers if id is not None}
        return self._makers.get(engine_id)

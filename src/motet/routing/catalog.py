"""What the members of a fleet serve and make, worked out when it is asked for and kept until a member changes.

Choosing a worker asks for it for every group, and members change rarely.
"""

from collections.abc import Mapping

from motet.ids import ModelName
from motet.routing.member import Member
from motet.routing.serving import Serving, serving
from motet.types import ModelCard


class Catalog:
    """Over the members by id, which its fleet owns; it says when one `changed`."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._serving: dict[str, Serving] = {}
        self._makers: dict[str, Member] | None = None
        self._models: dict[ModelName, ModelCard] = {}
        self._models_true = True

    def changed(self) -> None:
        """A member came, went, or is not what it was."""
        self._serving.clear()
        self._makers = None
        self._models_true = False

    def serving(self, model: str) -> Serving:
        """Who serves it; without a name, anything."""
        found = self._serving.get(model)
        if found is None:
            found = serving(self._members.values(), model)
            if not model or model in self.models:  # names that clients made up are not kept
                self._serving[model] = found
        return found

    @property
    def models(self) -> Mapping[ModelName, ModelCard]:
        """By name, in order of arrival; of members that are away too. The card is the first member's."""
        if not self._models_true:
            served: dict[ModelName, ModelCard] = {}
            for member in self._members.values():
                for card in member.cards:
                    served.setdefault(card.name, card)
            arrived = [name for name in self._models if name in served]
            self._models = {name: served[name] for name in dict.fromkeys((*arrived, *served))}
            self._models_true = True
        return self._models

    @property
    def makers(self) -> Mapping[str, Member]:
        """Of tickets, by the id that their engine writes into them."""
        if self._makers is None:
            made = ((member.engine_id, member) for member in self._members.values())
            self._makers = {engine_id: member for engine_id, member in made if engine_id is not None}
        return self._makers

"""Weights that replaced other weights on all workers: a group that has output tokens continues with the newest ones."""

MAX_REPLACED = 1000
"""Maximum number of replaced weights that are remembered. Groups with older weights cannot continue."""


class WeightSuccessors:
    """Digests of weights (`EngineInfo.model_digest`) that no worker has any more, with the digests of the weights that
    replaced them."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}
        """For each replaced digest, the digest that the workers have now."""

    def replace(self, old: str, new: str) -> None:
        """Notes that all workers that had the old weights have the new ones now."""
        if old == new:
            return
        self._present.pop(new, None)
        self._present = {digest: new if last == old else last for digest, last in self._present.items()}
        self._present[old] = new
        while len(self._present) > MAX_REPLACED:
            self._present.pop(next(iter(self._present)))

    def present(self, digest: str) -> str:
        """Returns the digest of the weights with which a group continues that was started with these."""
        return self._present.get(digest, digest)

"""Whether a worker may stand beside the others: a group that goes on elsewhere must find the same model there."""

from motet.engines.wire import EngineReport
from motet.types import EngineInfo, Role

INT8 = "-int8_"
"""What a fingerprint has in it when the weights are rounded."""


class Likeness:
    """What all workers of one gateway have in common. The first that is used says what that is."""

    def __init__(self) -> None:
        self._model: EngineInfo | None = None

    @property
    def model(self) -> EngineInfo | None:
        """Of the first; None: there has been none."""
        return self._model

    def problem(self, report: EngineReport, role: Role | None) -> str | None:
        """Why this worker cannot be used; None: it can. `role`: what it was named as."""
        info = report.info
        if role is not None and info.role is not role:
            return f"it was named as {role}, and its role is {info.role}"
        if self._model is None:
            self._model = info
        first = self._model
        for what, here, there in (
            ("serves the model", first.model, info.model),
            ("has a vocabulary of", first.vocab_size, info.vocab_size),
            ("ends answers with the tokens", first.eos_token_ids, info.eos_token_ids),
            ("computes in", numbers_of(first), numbers_of(info)),
        ):
            if here != there:
                return f"it {what} {there}, and the other workers {here}"
        return None


def numbers_of(info: EngineInfo) -> str:
    """What weights are kept in. Workers that differ in it are two models; machines may differ."""
    return f"{info.dtype} with int8 weights" if INT8 in info.fingerprint else info.dtype

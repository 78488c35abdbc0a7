"""Records the logits from which a core samples its tokens, so that two runs can be compared bit for bit."""

import torch

from motet.engines.native.build import Parts, build_parts
from motet.engines.native.core import EngineCore
from motet.engines.native.step.inputs import StepInputs
from motet.engines.native.step.run import ModelRunner
from motet.settings.engine_config import EngineConfig

RowKey = tuple[int, int]
"""Seed and position. Every choice of a test must have its own seed."""


class WrappedRunner:
    """A runner that forwards every call to another runner. Tests override single methods."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def trunk_tokens_saved(self) -> int:
        return self._runner.trunk_tokens_saved

    def run(self, inputs: StepInputs) -> torch.Tensor:
        return self._runner.run(inputs)

    def verify(self) -> None:
        self._runner.verify()

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        self._runner.copy_slots(source, target)

    def settle(self) -> None:
        self._runner.settle()


class LogitsRecorder(WrappedRunner):
    """A runner that records every row of logits from which a token is sampled."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.rows: dict[RowKey, torch.Tensor] = {}

    def run(self, inputs: StepInputs) -> torch.Tensor:
        logits = super().run(inputs)
        for token in inputs.next_tokens:
            self.rows[token.sequence.sampling.seed, token.position] = logits[token.row].clone()
        return logits


def recorded(core_config: EngineConfig) -> tuple[EngineCore, LogitsRecorder]:
    return recorded_over(build_parts(core_config))


def recorded_over(parts: Parts) -> tuple[EngineCore, LogitsRecorder]:
    """Returns a new core over a model and KV memory that other cores may have used before."""
    recorder = LogitsRecorder(parts.runner)
    return EngineCore(parts.info, recorder, options=parts.options), recorder

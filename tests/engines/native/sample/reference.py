"""A plain reference of the sampler in float64: one choice at a time, the complete vocabulary, a full sort."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from motet.engines.native.sample.lanes import SampleRow
from motet.engines.native.sample.philox import uniforms
from motet.engines.native.sample.state import ChoiceSampling, PromptTokens
from motet.types import SamplingParams

Row = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Past:
    """The past of a choice: its prompt, its output tokens and its seed."""

    seed: int = 0
    prompt: Sequence[int] = (1,)
    output_tokens: Sequence[int] = ()
    eos_token_ids: tuple[int, ...] = field(default=(0,))

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output_tokens)

    @property
    def uniform(self) -> float:
        return float(uniforms(np.array([self.seed], np.uint64), np.array([self.position], np.uint64))[0])

    def sample_row(self, logits_row: int, params: SamplingParams) -> SampleRow:
        state = ChoiceSampling(
            params,
            seed=self.seed,
            prompt=PromptTokens(self.prompt),
            eos_token_ids=self.eos_token_ids,
            output_tokens=self.output_tokens,
        )
        return SampleRow(logits_row, state, self.position)


def edited(logits: Row, params: SamplingParams, past: Past) -> Row:
    x = logits.copy()
    if len(past.output_tokens) < params.min_tokens:
        ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(past.eos_token_ids))
        x[list(ending)] = -np.inf
    for *before, last in params.bad_word_ids:
        if not before or tuple(past.output_tokens[-len(before) :]) == tuple(before):
            x[last] = -np.inf
    if params.allowed_token_ids:
        x[[token_id for token_id in range(len(x)) if token_id not in params.allowed_token_ids]] = -np.inf
    for token_id, bias in params.logit_bias.items():
        x[token_id] += bias
    for token_id in {*past.prompt, *past.output_tokens}:
        x[token_id] *= 1 / params.repetition_penalty if x[token_id] > 0 else params.repetition_penalty
    for token_id, count in Counter(past.output_tokens).items():
        x[token_id] -= count * params.frequency_penalty + params.presence_penalty
    return x


def weights(logits: Row, params: SamplingParams, past: Past | None = None) -> Row:
    """Returns the probability of each token after bias, penalties, temperature and filters."""
    x = edited(logits, params, past or Past())
    order = np.lexsort((np.arange(len(x)), -x))  # higher logit first, lower id among equals
    if params.greedy:
        return np.where(np.arange(len(x)) == order[0], 1.0, 0.0)
    scaled = (x - x.max()) / params.temperature
    kept = np.exp(scaled) / np.exp(scaled).sum()
    if params.top_k > 0:
        kept[order[params.top_k :]] = 0.0
    mass = np.cumsum(kept[order]) / kept.sum()
    if params.top_p < 1.0:
        kept[order[1 + int((mass < params.top_p).sum()) :]] = 0.0
    kept[kept < params.min_p * kept.max()] = 0.0
    result: Row = kept / kept.sum()
    return result


def token_of(probabilities: Row, uniform: float) -> int:
    """Returns the token at `uniform` in the cumulative distribution in id order."""
    cdf = np.cumsum(probabilities)
    return int(np.searchsorted(cdf, min(uniform * cdf[-1], np.nextafter(cdf[-1], 0)), side="right"))

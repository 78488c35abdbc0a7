"""Choices follow random schemas, and generate the same tokens however they are run.

The reference samples every token in one engine: it has log-probabilities and no drafts. `tests/structured` compares the
grammars of the same schemas with the reference implementation of JSON Schema.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import event, given

from motet.engines.native.core import EngineCore
from motet.errors import GrammarError
from motet.grammar.schema.client_schema import closed_source
from motet.types import ChoiceStart, FinishReason, GenerateRequest, Grammar, GrammarKind
from tests.engines.native.drive import GroupOutcome, group, make_core, prompt_of, run
from tests.engines.native.grammars import EOS_IDS, text_of, tiny_grammars, token_of
from tests.engines.native.pair import CorePair, with_ticket
from tests.property_settings import examples
from tests.structured.any_schema import schemas
from tests.structured.oracle import SchemaOracle
from tests.structured.schemas.case import Schema

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

N = 3
PROMPT = prompt_of(20)
CLOSING = dict.fromkeys((*map(token_of, '"]},:'), *EOS_IDS), 5.0)
"""Biases that let a model with random weights reach the end of its answer."""
PLACES = (1, 6, 17)
"""Numbers of output tokens after which choices are resumed."""


@cache
def core_of(model: Path, draft_tokens: int) -> EngineCore:
    return make_core(model, draft_tokens=draft_tokens)


def request_of(grammar: Grammar, *, starts: Sequence[ChoiceStart] | None = None, **fields: object) -> GenerateRequest:
    sampling = {"max_tokens": 80, "ignore_eos": False, "logit_bias": CLOSING, "temperature": 0.8, **fields}
    return group("g", PROMPT, n=N, seed=3, starts=starts, grammar=grammar, **sampling)  # type: ignore[arg-type]


def assert_same(outcome: GroupOutcome, expected: GroupOutcome) -> None:
    assert (outcome.error, outcome.tokens, outcome.finish) == (None, expected.tokens, expected.finish)


@examples(15)
@given(schemas)
def test_finished_answers_are_valid_and_equal_however_they_are_run(model: Path, schema: Schema) -> None:
    grammar = Grammar(GrammarKind.JSON, closed_source(json.dumps(schema)))
    try:
        tiny_grammars().get(grammar)
    except GrammarError:
        event("refused")
        return
    sampled = run(core_of(model, 0), [request_of(grammar, logprobs=0)])["g"]
    assert sampled.error is None
    for index, finish in sampled.finish.items():
        event(str(finish.reason))
        text = text_of(sampled.tokens[index])
        assert finish.reason is not FinishReason.STOP or SchemaOracle(schema).errors(text) == "", text

    assert_same(run(core_of(model, 0), [request_of(grammar)])["g"], sampled)  # with forced tokens
    assert_same(run(core_of(model, 8), [request_of(grammar)])["g"], sampled)  # with drafts, too
    for place in PLACES:
        starts = [ChoiceStart(i, 3 + i, (*tokens[:place],)) for i, tokens in sampled.tokens.items()]
        starts = [start for start in starts if len(sampled.tokens[start.index]) > place]
        if starts:
            rest = run(core_of(model, 8), [request_of(grammar, starts=starts)])["g"]
            whole = {i: [*sampled.tokens[i][:place], *tokens] for i, tokens in rest.tokens.items()}
            assert whole == {start.index: sampled.tokens[start.index] for start in starts}


@pytest.mark.long
@examples(8)
@given(schemas)
def test_choices_after_a_transfer_equal_those_of_a_single_engine(model: Path, schema: Schema) -> None:
    grammar = Grammar(GrammarKind.JSON, closed_source(json.dumps(schema)))
    try:
        tiny_grammars().get(grammar)
    except GrammarError:
        return
    pair = CorePair(model)
    pair.submit(with_ticket(request_of(grammar), pair.prefill(request_of(grammar))))
    pair.finish()
    pair.check_empty()
    assert_same(pair.outcomes["g"], run(core_of(model, 0), [request_of(grammar, logprobs=0)])["g"])

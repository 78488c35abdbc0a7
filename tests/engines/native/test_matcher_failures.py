"""A matcher that fails in the middle of an answer, for example at its work limit, ends its own group only."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from motet.engines.native.core import EngineCore
from motet.errors import GrammarError
from motet.grammar.compiled_grammar import CompiledGrammar, Matcher
from motet.types import Finish, FinishReason, GenerateRequest
from tests.engines.native.drive import GroupOutcome, group, make_core, prompt_of, run, take_step
from tests.engines.native.grammars import PERSON, person, tiny_grammars

pytestmark = pytest.mark.slow


class Failing(Matcher):
    """A matcher that reaches its limit at token number `num_tokens`."""

    def __init__(self, grammar: CompiledGrammar, num_tokens: int) -> None:
        super().__init__(grammar)
        self._left = num_tokens

    def consume(self, token_id: int) -> None:
        self._left -= 1
        if not self._left:
            raise GrammarError("too much work")
        super().consume(token_id)


def submit_failing(core: EngineCore, request: GenerateRequest, limits: Mapping[int, int]) -> None:
    """Submits a group in which the matchers of some choices, by index, fail at a token number."""
    compiled = tiny_grammars().get(PERSON)
    matchers: dict[int, Matcher] = {start.index: compiled.matcher() for start in request.choices}
    core.submit(request, matchers | {index: Failing(compiled, limit) for index, limit in limits.items()})


def test_a_matcher_that_fails_ends_its_own_group_and_names_the_choice(model: Path) -> None:
    good = [person("good", prompt_of(25, 1), n=2, seed=3), group("free", prompt_of(25, 2), n=2, seed=3, max_tokens=60)]
    alone = run(make_core(model), good)
    core = make_core(model)
    bad = person("bad", prompt_of(25), n=3, seed=1)
    submit_failing(core, bad, {1: 7})
    outcomes = {name: GroupOutcome() for name in ("bad", "good", "free")}
    for request in good:
        core.submit(request)
    while core.busy:
        take_step(core, outcomes)
    assert isinstance(outcomes["bad"].error, GrammarError)  # the client's fault, not the engine's
    assert outcomes["bad"].error.message == "choice 1: too much work"
    assert len(outcomes["bad"].tokens[1]) == 7
    assert {name: outcomes[name].tokens for name in alone} == {name: alone[name].tokens for name in alone}
    assert core.stats().blocks_used == 0


def test_a_matcher_that_fails_at_the_last_token_of_its_choice_ends_nothing(model: Path) -> None:
    request = person("g", prompt_of(25), max_tokens=7)
    core = make_core(model)
    submit_failing(core, request, {0: 7})
    outcomes = {"g": GroupOutcome()}
    while core.busy:
        take_step(core, outcomes)
    assert outcomes["g"].error is None and outcomes["g"].finish[0] == Finish(FinishReason.LENGTH)

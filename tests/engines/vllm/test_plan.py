"""Which requests make up a group, and in which order."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.constraint import Grammar, GrammarKind
from motet.engines.vllm.ask import Ask, prompt_ask, signed_seed
from motet.engines.vllm.plan import Plan, PlannedAsk, plan_asks, resumed_seed, without_ticket
from motet.errors import EngineError, WorkerLeavingError
from motet.ids import RequestId
from motet.types import ChoiceStart, GenerateRequest, SamplingParams, choice_starts
from tests.engines.vllm.asked import GREEDY, PARAMS, PROMPT, SAMPLING, group, ticket

ALONE = Ask(
    request_id="g:0", model="m", prompt=PROMPT, n=1, seed=None, sampling=SAMPLING, cache_salt="salt", priority=3
)


def shape(plan: Plan) -> list[tuple[int, int | None, tuple[tuple[int, ...], ...]]]:
    """n, seed and choices of each request, the leader first."""
    planned = [*([plan.leader] if plan.leader else []), *plan.rest]
    return [(one.ask.n, one.ask.seed, one.choices) for one in planned]


def test_choices_without_a_seed_are_one_request() -> None:
    assert plan_asks(group()) == Plan(None, (PlannedAsk(replace(ALONE, n=3), ((0,), (1,), (2,))),))


def test_consecutive_seeds_are_one_request_that_names_the_first() -> None:
    assert shape(plan_asks(group(seeded=True))) == [(3, 7, ((0,), (1,), (2,)))]


def test_a_gap_between_seeds_begins_another_request() -> None:
    choices = (ChoiceStart(0, 7), ChoiceStart(2, 9), ChoiceStart(3, 10))
    assert shape(plan_asks(group(choices=choices, seeded=True))) == [(1, 7, ((0,),)), (2, 9, ((2,), (3,)))]


def test_where_our_seeds_wrap_and_vllms_do_not_a_request_begins() -> None:
    choices = choice_starts(2, seed=2**64 - 1)
    assert shape(plan_asks(group(choices=choices, seeded=True))) == [(1, 2**64 - 1, ((0,),)), (1, 0, ((1,),))]


def test_choices_that_may_be_stopped_are_requests_of_their_own() -> None:
    assert shape(plan_asks(group(seeded=True, stops=True))) == [(1, 7, ((0,),)), (1, 8, ((1,),)), (1, 9, ((2,),))]


def test_greedy_choices_are_one_child_whose_tokens_are_everybodys_and_need_no_seed() -> None:
    assert shape(plan_asks(group(sampling=GREEDY, seeded=True, stops=True))) == [(1, None, ((0, 1, 2),))]


def test_greedy_choices_that_have_written_different_things_are_different_requests() -> None:
    choices = (ChoiceStart(0, 7, (9,)), ChoiceStart(1, 8), ChoiceStart(2, 9, (9,)))
    planned = plan_asks(group(choices=choices, sampling=GREEDY)).rest
    assert [(one.ask.prompt, one.choices) for one in planned] == [((*PROMPT, 9), ((0, 2),)), (PROMPT, ((1,),))]


def test_a_resumed_choice_goes_on_behind_what_it_wrote_with_another_seed() -> None:
    sampling = SamplingParams(max_tokens=10, temperature=0.5, min_tokens=4)
    (planned,) = plan_asks(group(choices=(ChoiceStart(1, 8, (20, 21, 22)),), sampling=sampling, seeded=True)).rest
    assert planned.ask == replace(
        ALONE,
        prompt=(*PROMPT, 20, 21, 22),
        seed=resumed_seed(8, 3),
        sampling=SamplingParams(max_tokens=7, temperature=0.5, min_tokens=1),
    )


def test_min_tokens_that_were_written_are_not_asked_for_again() -> None:
    sampling = SamplingParams(max_tokens=10, min_tokens=2)
    (planned,) = plan_asks(group(choices=(ChoiceStart(0, 7, (20, 21, 22)),), sampling=sampling)).rest
    assert (planned.ask.sampling.max_tokens, planned.ask.sampling.min_tokens) == (7, 0)


def test_a_resumed_choice_has_its_own_seed_at_every_length() -> None:
    assert len({resumed_seed(seed, length) for seed in range(8) for length in range(1, 9)}) == 64
    assert resumed_seed(8, 3) == 8128751145005083446


def test_penalties_of_written_tokens_go_along_as_biases() -> None:
    sampling = SamplingParams(
        max_tokens=10, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={20: 1.0, 30: -2.0}
    )
    (planned,) = plan_asks(group(choices=(ChoiceStart(0, 7, (20, 21, 20)),), sampling=sampling)).rest
    assert planned.ask.sampling.logit_bias == {20: 1.0 - 2 * 0.5 - 0.25, 21: -0.75, 30: -2.0}


def test_biases_stay_within_what_vllm_takes() -> None:
    sampling = SamplingParams(max_tokens=200, frequency_penalty=2.0)
    (planned,) = plan_asks(group(choices=(ChoiceStart(0, 7, (20,) * 99),), sampling=sampling)).rest
    assert planned.ask.sampling.logit_bias == {20: -100.0}


def test_without_such_penalties_no_bias_is_added() -> None:
    sampling = SamplingParams(max_tokens=10, repetition_penalty=1.5, logit_bias={30: -2.0})
    (planned,) = plan_asks(group(choices=(ChoiceStart(0, 7, (20,)),), sampling=sampling)).rest
    assert planned.ask.sampling.logit_bias == {30: -2.0}


def test_a_choice_that_has_written_all_there_is_cannot_be_resumed() -> None:
    choices = (ChoiceStart(0, 7, (20, 21)),)
    with pytest.raises(EngineError, match=r"choice 0 of group g has written 2 of 2 tokens already"):
        plan_asks(group(choices=choices, sampling=SamplingParams(max_tokens=2)))


def test_a_choice_with_a_grammar_is_begun_here_and_never_taken_up_in_mid_answer() -> None:
    bound = msgspec.structs.replace(SAMPLING, grammar=Grammar(GrammarKind.REGEX, "a+"))
    (planned,) = plan_asks(group(n=3, sampling=bound)).rest
    assert planned.ask.sampling.grammar == bound.grammar
    resumed = group(choices=(ChoiceStart(0, 7), ChoiceStart(1, 8, (20,))), sampling=bound)
    with pytest.raises(WorkerLeavingError, match=r"choice 1 follows a grammar"):
        plan_asks(resumed)


def test_the_first_fresh_choice_goes_ahead_with_the_ticket() -> None:
    plan = plan_asks(group(n=4, seeded=True, ticket=ticket()))
    assert plan.leader == PlannedAsk(replace(ALONE, request_id="g:leader", seed=7, kv_params=PARAMS), ((0,),))
    assert shape(plan)[1:] == [(3, 8, ((1,), (2,), (3,)))]
    assert plan.rest[0].ask.kv_params is None


def test_a_resumed_choice_leaves_the_ticket_to_a_fresh_one() -> None:
    choices = (ChoiceStart(0, 7, (20,)), ChoiceStart(1, 8), ChoiceStart(2, 9))
    plan = plan_asks(group(choices=choices, seeded=True, ticket=ticket()))
    assert shape(plan) == [(1, 8, ((1,),)), (1, resumed_seed(7, 1), ((0,),)), (1, 9, ((2,),))]


def test_where_all_are_resumed_a_scout_fetches_the_prompt() -> None:
    choices = (ChoiceStart(0, 7, (20,)), ChoiceStart(1, 8, (21,)))
    plan = plan_asks(group(choices=choices, ticket=ticket()))
    scouting = SamplingParams(max_tokens=1, temperature=0.0)
    assert plan.leader == PlannedAsk(replace(ALONE, request_id="g:leader", sampling=scouting, kv_params=PARAMS), ((),))
    assert [one.choices for one in plan.rest] == [((0,),), ((1,),)]


def test_a_greedy_group_is_its_leader() -> None:
    plan = plan_asks(group(sampling=GREEDY, ticket=ticket()))
    assert (shape(plan), plan.rest) == ([(1, None, ((0, 1, 2),))], ())


def test_the_prompt_is_asked_for_by_itself_if_its_logprobs_are_wanted() -> None:
    sampling = msgspec.structs.replace(SAMPLING, prompt_logprobs=2)
    plan = plan_asks(group(choices=(ChoiceStart(0, 7, (20,)),), sampling=sampling))
    assert plan.prompt is not None
    assert prompt_ask(plan.prompt) == prompt_ask(replace(ALONE, request_id="g:prompt", sampling=sampling))
    assert plan.prompt.prompt == PROMPT


def test_a_group_without_its_ticket_is_asked_for_by_another_name() -> None:
    request = group(ticket=ticket())
    plain = without_ticket(request, [0, 2], name="again")
    assert plain == msgspec.structs.replace(
        request, request_id=RequestId("g:again"), ticket=None, choices=(request.choices[0], request.choices[2])
    )


def starts(index: int) -> st.SearchStrategy[ChoiceStart]:
    return st.builds(
        ChoiceStart,
        st.just(index),
        st.integers(0, 3).map(lambda gap: (2**64 - 3 + index + gap) % 2**64),
        st.sampled_from([(), (), (), (9,), (9, 10)]),
    )


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    indices = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True))
    return group(
        choices=tuple(draw(starts(index)) for index in indices),
        sampling=draw(st.sampled_from([SAMPLING, GREEDY])),
        ticket=draw(st.sampled_from([None, ticket()])),
        seeded=draw(st.booleans()),
        stops=draw(st.booleans()),
    )


@given(requests())
def test_every_choice_is_asked_for_once_with_its_prompt_and_seed_and_one_request_has_the_ticket(
    request: GenerateRequest,
) -> None:
    plan = plan_asks(request)
    leader = [plan.leader] if plan.leader else []
    planned = [*leader, *plan.rest]
    assert sorted(index for one in planned for index in one.indices) == sorted(s.index for s in request.choices)
    assert [one.ask.kv_params for one in planned if one.ask.kv_params is not None] == [PARAMS] * len(leader)
    assert len(leader) == (request.ticket is not None)
    assert all(one.ask.kv_params is not None and one.ask.n == 1 and one.ask.prompt == PROMPT for one in leader)
    assert len({one.ask.request_id for one in planned}) == len(planned)
    of_index = {start.index: start for start in request.choices}
    for one in planned:
        assert len(one.choices) == one.ask.n
        assert one.ask.n == 1 or not (request.stops or request.sampling.greedy)
        for child, indices in enumerate(one.choices):
            for start in (of_index[index] for index in indices):
                assert one.ask.prompt == PROMPT + start.written
                assert one.ask.sampling.max_tokens == 50 - len(start.written)
                check_seed(one.ask, child, start, request)


def check_seed(ask: Ask, child: int, start: ChoiceStart, request: GenerateRequest) -> None:
    """What vLLM draws with is what it would draw with if the choice were alone."""
    if not request.seeded or request.sampling.greedy:
        assert ask.seed is None
        return
    assert ask.seed is not None
    alone = resumed_seed(start.seed, len(start.written)) if start.written else start.seed
    assert signed_seed(ask.seed) + child == signed_seed(alone)

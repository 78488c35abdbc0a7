"""The requests that make up a group, and the JSON of each, with all of Motet's sampling parameters by vLLM's names."""

from dataclasses import replace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.vllm.requests import (
    Dialect,
    GroupRequests,
    VLLMRequest,
    body_of,
    plan_requests,
    prefill_request,
    prompt_logprobs_request,
    resumed_seed,
    signed_seed,
    without_ticket,
)
from motet.errors import EngineError, RequestError, WorkerLeavingError
from motet.ids import RequestId
from motet.types import (
    ANY_ANSWER,
    VERBATIM_FIELDS,
    ChoiceStart,
    GenerateRequest,
    Grammar,
    GrammarKind,
    LogprobsMode,
    SamplingParams,
    Thinking,
    ThinkingBudget,
    choice_starts,
)
from tests.engines.vllm.scripted_vllm import GREEDY, PARAMS, PROMPT, SAMPLING, group, ticket

ALONE = VLLMRequest(
    request_id="g:0",
    model="m",
    prompt=PROMPT,
    n=1,
    seed=None,
    sampling=SAMPLING,
    cache_salt="salt",
    priority=3,
    trace="trace-g",
    session_id="session-1",
    choices=((0,),),
)


def shape(plan: GroupRequests) -> list[tuple[int, int | None, tuple[tuple[int, ...], ...]]]:
    """Returns n, seed and choices of each request, the leader first."""
    planned = [*([plan.leader] if plan.leader else []), *plan.rest]
    return [(one.n, one.seed, one.choices) for one in planned]


def test_choices_without_a_seed_are_one_request() -> None:
    assert plan_requests(group()) == GroupRequests(None, (replace(ALONE, n=3, choices=((0,), (1,), (2,))),))


GAP = (ChoiceStart(0, 7), ChoiceStart(2, 9), ChoiceStart(3, 10))
SHAPES = {
    "consecutive seeds": (group(seeded=True), [(3, 7, ((0,), (1,), (2,)))]),
    "a gap": (group(choices=GAP, seeded=True), [(1, 7, ((0,),)), (2, 9, ((2,), (3,)))]),
    "our seeds wrap, vLLM's do not": (
        group(choices=choice_starts(2, seed=2**64 - 1), seeded=True),
        [(1, 2**64 - 1, ((0,),)), (1, 0, ((1,),))],
    ),
    "with stop strings": (group(seeded=True, stops=True), [(1, 7, ((0,),)), (1, 8, ((1,),)), (1, 9, ((2,),))]),
    "greedy": (group(sampling=GREEDY, seeded=True, stops=True), [(1, None, ((0, 1, 2),))]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_choices_with_seeds_in_a_row_are_one_request_unless_stop_strings_may_end_one(name: str) -> None:
    request, asked = SHAPES[name]
    assert shape(plan_requests(request)) == asked


def test_greedy_choices_with_different_output_tokens_are_different_requests() -> None:
    choices = (ChoiceStart(0, 7, (9,)), ChoiceStart(1, 8), ChoiceStart(2, 9, (9,)))
    planned = plan_requests(group(choices=choices, sampling=GREEDY)).rest
    assert [(one.prompt, one.choices) for one in planned] == [((*PROMPT, 9), ((0, 2),)), (PROMPT, ((1,),))]


def test_a_resumed_choice_continues_after_its_output_tokens_with_another_seed() -> None:
    sampling = SamplingParams(max_tokens=10, temperature=0.5, min_tokens=4)
    (planned,) = plan_requests(group(choices=(ChoiceStart(1, 8, (20, 21, 22)),), sampling=sampling, seeded=True)).rest
    assert planned == replace(
        ALONE,
        choices=((1,),),
        prompt=(*PROMPT, 20, 21, 22),
        seed=resumed_seed(8, 3),
        sampling=SamplingParams(max_tokens=7, temperature=0.5, min_tokens=1),
    )


def test_a_resumed_choice_has_its_own_seed_at_every_length() -> None:
    assert len({resumed_seed(seed, length) for seed in range(8) for length in range(1, 9)}) == 64
    assert resumed_seed(8, 3) == 8128751145005083446


RESUMED = {
    "min_tokens are written": (SamplingParams(max_tokens=10, min_tokens=2), (20, 21, 22), SamplingParams(max_tokens=7)),
    "penalties of written tokens become biases": (
        SamplingParams(max_tokens=10, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={20: 1.0, 30: -2.0}),
        (20, 21, 20),
        SamplingParams(
            max_tokens=7,
            frequency_penalty=0.5,
            presence_penalty=0.25,
            logit_bias={20: 1.0 - 2 * 0.5 - 0.25, 21: -0.75, 30: -2.0},
        ),
    ),
    "biases stay within vLLM's limits": (
        SamplingParams(max_tokens=200, frequency_penalty=2.0),
        (20,) * 99,
        SamplingParams(max_tokens=101, frequency_penalty=2.0, logit_bias={20: -100.0}),
    ),
    "other penalties make no bias": (
        SamplingParams(max_tokens=10, repetition_penalty=1.5, logit_bias={30: -2.0}),
        (20,),
        SamplingParams(max_tokens=9, repetition_penalty=1.5, logit_bias={30: -2.0}),
    ),
}


@pytest.mark.parametrize("name", RESUMED)
def test_the_sampling_of_a_resumed_choice_takes_its_output_tokens_into_account(name: str) -> None:
    sampling, written, left = RESUMED[name]
    (planned,) = plan_requests(group(choices=(ChoiceStart(0, 7, written),), sampling=sampling)).rest
    assert planned.sampling == left


def test_a_choice_that_already_has_max_tokens_cannot_be_resumed() -> None:
    choices = (ChoiceStart(0, 7, (20, 21)),)
    with pytest.raises(EngineError, match=r"choice 0 of group g already has 2 of 2 tokens"):
        plan_requests(group(choices=choices, sampling=SamplingParams(max_tokens=2)))


def test_a_choice_with_a_grammar_can_start_on_vllm_but_not_be_resumed() -> None:
    bound = msgspec.structs.replace(SAMPLING, grammar=Grammar(GrammarKind.REGEX, "a+"))
    (planned,) = plan_requests(group(n=3, sampling=bound)).rest
    assert planned.sampling.grammar == bound.grammar
    resumed = group(choices=(ChoiceStart(0, 7), ChoiceStart(1, 8, (20,))), sampling=bound)
    with pytest.raises(WorkerLeavingError, match=r"choice 1 follows a grammar"):
        plan_requests(resumed)


def test_the_first_fresh_choice_is_sent_first_with_the_ticket() -> None:
    plan = plan_requests(group(n=4, seeded=True, ticket=ticket()))
    assert plan.leader == replace(ALONE, request_id="g:leader", seed=7, kv_params=PARAMS)
    assert shape(plan)[1:] == [(3, 8, ((1,), (2,), (3,)))]
    assert plan.rest[0].kv_params is None


def test_a_resumed_choice_leaves_the_ticket_to_a_fresh_one() -> None:
    choices = (ChoiceStart(0, 7, (20,)), ChoiceStart(1, 8), ChoiceStart(2, 9))
    plan = plan_requests(group(choices=choices, seeded=True, ticket=ticket()))
    assert shape(plan) == [(1, 8, ((1,),)), (1, resumed_seed(7, 1), ((0,),)), (1, 9, ((2,),))]


def test_if_all_choices_are_resumed_a_scout_fetches_the_prompt() -> None:
    choices = (ChoiceStart(0, 7, (20,)), ChoiceStart(1, 8, (21,)))
    plan = plan_requests(group(choices=choices, ticket=ticket()))
    scouting = SamplingParams(max_tokens=1, temperature=0.0)
    assert plan.leader == replace(ALONE, request_id="g:leader", sampling=scouting, kv_params=PARAMS, choices=((),))
    assert [one.choices for one in plan.rest] == [((0,),), ((1,),)]


def test_a_greedy_group_is_only_its_leader() -> None:
    plan = plan_requests(group(sampling=GREEDY, ticket=ticket()))
    assert (shape(plan), plan.rest) == ([(1, None, ((0, 1, 2),))], ())


def test_prompt_logprobs_are_requested_first_without_a_choice() -> None:
    request = group(choices=(ChoiceStart(0, 7, (20,)),), sampling=msgspec.structs.replace(SAMPLING, prompt_logprobs=2))
    plan = plan_requests(request)
    assert plan.prompt == prompt_logprobs_request(request) and plan.prompt is not None
    assert (plan.prompt.prompt, plan.prompt.choices) == (PROMPT, ((),))
    assert [one.choices for one in plan.rest] == [((0,),)]


def test_prompt_logprobs_are_requested_with_a_choice_of_one_token() -> None:
    """The bug: scoring a prompt took two requests, each of which computed it."""
    one_token = msgspec.structs.replace(SAMPLING, max_tokens=1, prompt_logprobs=2, logprobs=1)
    plan = plan_requests(group(choices=(ChoiceStart(0, 7), ChoiceStart(1, 9)), sampling=one_token, seeded=True))
    assert plan.prompt == replace(plan.prompt or ALONE, sampling=one_token, seed=7, stream=False, choices=((0,),))
    assert [one.choices for one in plan.rest] == [((1,),)]
    several = plan_requests(group(choices=(ChoiceStart(0, 7), ChoiceStart(1, 8)), sampling=one_token, seeded=True))
    assert several.prompt is not None and several.prompt.choices == ((),), "each child would have all scores"
    assert [one.choices for one in several.rest] == [((0,), (1,))]


def test_a_group_that_continues_without_its_ticket_gets_another_name() -> None:
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


@pytest.mark.slow
@given(requests())
def test_every_choice_is_planned_once_with_its_seed_and_one_request_has_the_ticket(
    request: GenerateRequest,
) -> None:
    plan = plan_requests(request)
    leader = [plan.leader] if plan.leader else []
    planned = [*leader, *plan.rest]
    assert sorted(index for one in planned for index in one.indices) == sorted(s.index for s in request.choices)
    assert [one.kv_params for one in planned if one.kv_params is not None] == [PARAMS] * len(leader)
    assert len(leader) == (request.ticket is not None)
    assert all(one.kv_params is not None and one.n == 1 and one.prompt == PROMPT for one in leader)
    assert len({one.request_id for one in planned}) == len(planned)
    of_index = {start.index: start for start in request.choices}
    for one in planned:
        assert len(one.choices) == one.n
        assert one.n == 1 or not (request.stops or request.sampling.greedy)
        for child, indices in enumerate(one.choices):
            for start in (of_index[index] for index in indices):
                assert one.prompt == PROMPT + start.output_tokens
                assert one.sampling.max_tokens == 50 - len(start.output_tokens)
                check_seed(one, child, start, request)


def check_seed(ask: VLLMRequest, child: int, start: ChoiceStart, request: GenerateRequest) -> None:
    """Checks that vLLM gives the child the same seed as if the choice were alone."""
    if not request.seeded or request.sampling.greedy:
        assert ask.seed is None
        return
    assert ask.seed is not None
    alone = resumed_seed(start.seed, len(start.output_tokens)) if start.output_tokens else start.seed
    assert signed_seed(ask.seed) + child == signed_seed(alone)


DEFAULTS: dict[str, object] = {
    "n": 3,
    "seed": None,
    "max_tokens": 9,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "ignore_eos": False,
    "stop_token_ids": [],
    "prompt_logprobs": None,
}
DEFAULTS |= {name: getattr(SamplingParams(max_tokens=9), name) for name in VERBATIM_FIELDS if name not in DEFAULTS}
ASK = VLLMRequest(request_id="r-1", model="m", prompt=(5, 6), n=3, seed=None, sampling=SamplingParams(max_tokens=9))
UNUSUAL = SamplingParams(
    max_tokens=20,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    presence_penalty=0.2,
    frequency_penalty=-0.3,
    repetition_penalty=1.1,
    logit_bias={7: -100.0},
    allowed_token_ids=(7, 8),
    min_tokens=4,
    ignore_eos=True,
    stop_token_ids=(2, 9),
    bad_words=("no", "never"),
    bad_word_ids=((5,), (6, 7)),
    logprobs=5,
    prompt_logprobs=2,
)


def body(dialect: Dialect, ask: VLLMRequest) -> dict[str, object]:
    return msgspec.json.decode(body_of(dialect, ask), type=dict[str, object])


def sampling_of(dialect: Dialect, ask: VLLMRequest) -> dict[str, object]:
    """Returns the object that has the sampling parameters."""
    sent = body(dialect, ask)
    return cast("dict[str, object]", sent["sampling_params"]) if dialect is Dialect.GENERATE else sent


def test_a_completions_body_requests_token_ids_and_states_every_default() -> None:
    assert body(Dialect.COMPLETIONS, ASK) == {
        "model": "m",
        "request_id": "r-1",
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": [5, 6],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logprobs": None,
        "logprob_token_ids": None,
        **DEFAULTS,
    }


def test_a_generate_body_has_the_same_in_sampling_params_and_requests_no_text() -> None:
    assert body(Dialect.GENERATE, ASK) == {
        "model": "m",
        "request_id": "r-1",
        "stream": True,
        "stream_options": {"include_usage": True},
        "token_ids": [5, 6],
        "sampling_params": {**DEFAULTS, "logprobs": None, "logprob_token_ids": None, "detokenize": False},
    }


def test_named_tokens_are_requested_with_capacity_for_the_sampled_one() -> None:
    """`/inference/v1/generate` counts the sampled token as one of the listed ones, and would leave the last one out."""
    ask = replace(ASK, sampling=SamplingParams(max_tokens=9, logprobs=0, logprob_token_ids=(7, 8)))
    sent = sampling_of(Dialect.GENERATE, ask)
    assert (sent["logprobs"], sent["logprob_token_ids"]) == (3, [7, 8, 7])
    sent = sampling_of(Dialect.COMPLETIONS, ask)
    assert (sent["logprobs"], sent["logprob_token_ids"]) == (0, [7, 8])
    many = SamplingParams(max_tokens=9, logprobs=0, logprob_token_ids=tuple(range(20)))
    with pytest.raises(RequestError, match="at most 19 tokens") as refused:
        sampling_of(Dialect.GENERATE, replace(ASK, sampling=many))
    assert refused.value.param == "logprob_token_ids"


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(max_tokens=9, logprobs=1, logprob_token_ids=(7,)), "logprob_token_ids"),
        (SamplingParams(max_tokens=9, prompt_logprobs=0, prompt_logprob_token_ids=(7,)), "logprob_token_ids"),
        (SamplingParams(max_tokens=9, logprobs=0, logprobs_mode=LogprobsMode.PROCESSED), "logprobs_mode"),
        (SAMPLING, "keep_s"),
    ],
)
def test_what_a_vllm_server_does_not_do_is_refused_by_name(sampling: SamplingParams, param: str) -> None:
    """A vLLM server has one mode of log-probabilities for all requests, and does not report it."""
    with pytest.raises(RequestError, match="the model is on a vLLM server") as refused:
        plan_requests(msgspec.structs.replace(group(sampling=sampling), keep_s=float(param == "keep_s")))
    assert refused.value.param == param


@pytest.mark.parametrize("dialect", Dialect)
def test_every_parameter_is_sent(dialect: Dialect) -> None:
    sent = sampling_of(dialect, replace(ASK, sampling=UNUSUAL, seed=2**63, stream=False))
    expected = msgspec.to_builtins(UNUSUAL) | {"n": 3, "seed": 2**32, "logit_bias": {"7": -100.0}}
    del expected["bad_word_ids"]  # the server turns the texts into tokens
    expected["bad_words"] = ["no", "never"]
    expected |= {"stop_token_ids": [2, 9], "allowed_token_ids": [7, 8], "logprob_token_ids": None}
    if dialect is Dialect.GENERATE:
        expected["logprobs"] = 6
    assert {name: sent[name] for name in expected} == expected
    translated = {"bad_word_ids", "extra_args", "grammar", "logprobs_mode", "prompt_logprob_token_ids"}
    assert set(msgspec.structs.asdict(UNUSUAL)) <= {*sent, *translated}  # no field is missing


def test_extra_arguments_are_sent_under_the_name_of_each_route() -> None:
    ask = replace(ASK, sampling=SamplingParams(max_tokens=9, extra_args='{"a":[1,"b"]}'))
    assert sampling_of(Dialect.GENERATE, ask)["extra_args"] == {"a": [1, "b"]}
    assert "extra_args" not in body(Dialect.GENERATE, ask)
    sent = body(Dialect.COMPLETIONS, ask)
    assert sent["vllm_xargs"] == {"a": [1, "b"]}
    assert "extra_args" not in sent


GRAMMARS = (
    (Grammar(GrammarKind.JSON, '{"type": "object"}'), {"json": '{"type": "object"}'}),
    (Grammar(GrammarKind.REGEX, "[a-z]+"), {"regex": "[a-z]+"}),
    (Grammar(GrammarKind.CHOICE, '["yes", "n\u00f6"]'), {"choice": ["yes", "nö"]}),
    (Grammar(GrammarKind.LARK, 'start: "a"'), {"grammar": 'start: "a"'}),
    (Grammar(GrammarKind.REGEX, "a", Thinking("<think>", "</think>", opened=True)), {"regex": "a"}),
)


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(("grammar", "sent"), GRAMMARS)
def test_a_grammar_is_sent_by_vllms_name_and_wins_over_min_tokens_and_ignore_eos(
    dialect: Dialect, grammar: Grammar, sent: dict[str, object]
) -> None:
    drawn = sampling_of(dialect, replace(ASK, sampling=msgspec.structs.replace(UNUSUAL, grammar=grammar)))
    assert drawn["structured_outputs"] == sent
    assert (drawn["min_tokens"], drawn["ignore_eos"]) == (0, False)
    without = sampling_of(dialect, replace(ASK, sampling=UNUSUAL))
    assert "structured_outputs" not in without and without["min_tokens"] == 4


@pytest.mark.parametrize("dialect", Dialect)
def test_a_budget_of_reasoning_is_sent_by_vllms_name(dialect: Dialect) -> None:
    thinking = Thinking("<think>", "</think>", opened=True, budget=ThinkingBudget(7, 1, 2))
    for source, structured in ((ANY_ANSWER, None), ("start: /a/", {"grammar": "start: /a/"})):
        sampling = msgspec.structs.replace(UNUSUAL, grammar=Grammar(GrammarKind.LARK, source, thinking))
        sent = sampling_of(dialect, replace(ASK, sampling=sampling))
        assert (sent["thinking_token_budget"], sent.get("structured_outputs")) == (7, structured)


def test_prefills_and_requests_for_prompt_logprobs_have_no_grammar() -> None:
    ask = replace(ASK, sampling=msgspec.structs.replace(UNUSUAL, grammar=GRAMMARS[0][0]))
    scored = prompt_logprobs_request(group(sampling=msgspec.structs.replace(ask.sampling, prompt_logprobs=0)))
    for beside in (prefill_request(ask), scored):
        assert "structured_outputs" not in sampling_of(Dialect.COMPLETIONS, beside)


@pytest.mark.parametrize("dialect", Dialect)
def test_a_stream_does_not_request_the_log_probabilities_of_the_prompt(dialect: Dialect) -> None:
    """vLLM refuses them in a stream."""
    assert sampling_of(dialect, replace(ASK, sampling=UNUSUAL))["prompt_logprobs"] is None


@pytest.mark.parametrize("dialect", Dialect)
def test_priority_salt_and_ticket_are_sent_only_if_they_are_set(dialect: Dialect) -> None:
    assert {"priority", "cache_salt", "kv_transfer_params"}.isdisjoint(body(dialect, ASK))
    around = {"priority": -2, "cache_salt": "s", "kv_transfer_params": {"opaque": [1]}}
    sent = body(dialect, replace(ASK, priority=-2, cache_salt="s", kv_params={"opaque": [1]}))
    assert {name: sent[name] for name in around} == around


@pytest.mark.parametrize(("asked", "sent"), [(None, None), (0, 0), (1, 2), (5, 6), (19, 20), (20, 20), (25, 25)])
def test_generate_is_sent_one_log_probability_more_within_vllms_limit(asked: int | None, sent: int | None) -> None:
    """It counts the sampled token as one of the k."""
    ask = replace(ASK, sampling=SamplingParams(max_tokens=9, logprobs=asked))
    assert sampling_of(Dialect.GENERATE, ask)["logprobs"] == sent
    assert sampling_of(Dialect.COMPLETIONS, ask)["logprobs"] == asked


@pytest.mark.parametrize("dialect", Dialect)
def test_a_prefill_requests_one_greedy_token_and_a_ticket_without_a_stream(dialect: Dialect) -> None:
    ask = replace(ASK, sampling=UNUSUAL, seed=7, cache_salt="s", kv_params={"old": 1})
    sent = body(dialect, prefill_request(ask))
    assert (sent["stream"], sent["cache_salt"], "stream_options" in sent) == (False, "s", False)
    assert sent["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    changed = {"n": 1, "max_tokens": 1, "temperature": 0.0}
    expected = DEFAULTS | changed
    assert {name: sampling_of(dialect, prefill_request(ask))[name] for name in expected} == expected


@pytest.mark.parametrize("dialect", Dialect)
def test_prompt_logprobs_are_requested_with_one_token_and_without_a_stream(dialect: Dialect) -> None:
    ask = prompt_logprobs_request(group(sampling=UNUSUAL, ticket=ticket()))
    sent = sampling_of(dialect, ask)
    assert (sent["prompt_logprobs"], sent["max_tokens"], sent["n"], sent["logprobs"]) == (2, 1, 1, None)
    assert (ask.stream, ask.kv_params, ask.prompt) == (False, None, PROMPT)


def test_usual_seeds_stay_as_they_are() -> None:
    assert [signed_seed(seed) for seed in (0, 1, 42, 2**53, 2**63 - 2**32 - 1)] == [0, 1, 42, 2**53, 2**63 - 2**32 - 1]


def test_seeds_at_a_certain_distance_become_the_same_seed() -> None:
    assert signed_seed(5 + 2**63 - 2**32) == signed_seed(5)


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**32))
def test_no_child_is_unseeded_or_beyond_64_signed_bits(seed: int, n: int) -> None:
    assert signed_seed(seed) >= 0
    assert signed_seed(seed) + n - 1 < 2**63


@given(st.integers(0, 2**64 - 1), st.integers(0, 200))
def test_a_child_has_the_seed_of_a_single_request_unless_the_seeds_wrap_around(seed: int, child: int) -> None:
    single = signed_seed((seed + child) % 2**64)
    counted = signed_seed(seed) + child
    assert single in (counted, counted - (2**63 - 2**32)) or seed + child >= 2**64


@pytest.mark.parametrize("dialect", Dialect)
def test_fields_that_the_client_omits_are_not_sent_so_that_the_servers_defaults_apply(dialect: Dialect) -> None:
    unset = ("min_p", "temperature", "top_k", "top_p")
    request = msgspec.structs.replace(group(sampling=SamplingParams(max_tokens=9)), unset_fields=unset)
    (planned,) = plan_requests(request).rest
    assert not {*unset} & sampling_of(dialect, planned).keys()
    assert sampling_of(dialect, planned)["repetition_penalty"] == 1.0
    # Requests whose tokens are discarded are greedy, whatever the client sent.
    assert sampling_of(dialect, prefill_request(planned))["temperature"] == 0.0

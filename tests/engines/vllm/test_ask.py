"""What a vLLM server is sent: every one of our sampling parameters, by the names of vLLM's source."""

from dataclasses import replace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.constraint import Grammar, GrammarKind, Thinking
from motet.engines.vllm.ask import Ask, Dialect, body_of, prefill_ask, prompt_ask, signed_seed
from motet.types import SamplingParams

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
    "ignore_eos": False,
    "stop_token_ids": [],
    "prompt_logprobs": None,
}
ASK = Ask(request_id="r-1", model="m", prompt=(5, 6), n=3, seed=None, sampling=SamplingParams(max_tokens=9))
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
    min_tokens=4,
    ignore_eos=True,
    stop_token_ids=(2, 9),
    logprobs=5,
    prompt_logprobs=2,
)


def body(dialect: Dialect, ask: Ask) -> dict[str, object]:
    return msgspec.json.decode(body_of(dialect, ask), type=dict[str, object])


def drawing(dialect: Dialect, ask: Ask) -> dict[str, object]:
    """Where the sampling parameters stand."""
    sent = body(dialect, ask)
    return cast("dict[str, object]", sent["sampling_params"]) if dialect is Dialect.GENERATE else sent


def test_completions_are_asked_for_token_ids_and_with_every_default_said() -> None:
    assert body(Dialect.COMPLETIONS, ASK) == {
        "model": "m",
        "request_id": "r-1",
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": [5, 6],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logprobs": None,
        **DEFAULTS,
    }


def test_generate_takes_the_same_in_sampling_params_and_writes_no_text() -> None:
    assert body(Dialect.GENERATE, ASK) == {
        "model": "m",
        "request_id": "r-1",
        "stream": True,
        "stream_options": {"include_usage": True},
        "token_ids": [5, 6],
        "sampling_params": {**DEFAULTS, "logprobs": None, "detokenize": False},
    }


@pytest.mark.parametrize("dialect", Dialect)
def test_every_parameter_arrives(dialect: Dialect) -> None:
    sent = drawing(dialect, replace(ASK, sampling=UNUSUAL, seed=2**63, stream=False))
    expected = msgspec.to_builtins(UNUSUAL) | {"n": 3, "seed": 2**32, "logit_bias": {"7": -100.0}}
    expected["stop_token_ids"] = [2, 9]
    if dialect is Dialect.GENERATE:
        expected["logprobs"] = 6
    assert {name: sent[name] for name in expected} == expected
    assert set(msgspec.structs.asdict(UNUSUAL)) <= {*expected, "grammar"}  # none was forgotten here


GRAMMARS = (
    (Grammar(GrammarKind.JSON, '{"type": "object"}'), {"json": '{"type": "object"}'}),
    (Grammar(GrammarKind.REGEX, "[a-z]+"), {"regex": "[a-z]+"}),
    (Grammar(GrammarKind.CHOICE, '["yes", "n\u00f6"]'), {"choice": ["yes", "nö"]}),
    (Grammar(GrammarKind.LARK, 'start: "a"'), {"grammar": 'start: "a"'}),
    (Grammar(GrammarKind.REGEX, "a", Thinking("<think>", "</think>", opened=True)), {"regex": "a"}),
)


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(("grammar", "sent"), GRAMMARS)
def test_a_grammar_goes_along_by_vllms_name_and_wins_over_what_would_write_on(
    dialect: Dialect, grammar: Grammar, sent: dict[str, object]
) -> None:
    drawn = drawing(dialect, replace(ASK, sampling=msgspec.structs.replace(UNUSUAL, grammar=grammar)))
    assert drawn["structured_outputs"] == sent
    assert (drawn["min_tokens"], drawn["ignore_eos"]) == (0, False)
    without = drawing(dialect, replace(ASK, sampling=UNUSUAL))
    assert "structured_outputs" not in without and without["min_tokens"] == 4


def test_what_is_asked_beside_the_choices_has_no_grammar() -> None:
    ask = replace(ASK, sampling=msgspec.structs.replace(UNUSUAL, grammar=GRAMMARS[0][0]))
    for beside in (prefill_ask(ask), prompt_ask(ask)):
        assert "structured_outputs" not in drawing(Dialect.COMPLETIONS, beside)


@pytest.mark.parametrize("dialect", Dialect)
def test_a_stream_does_not_ask_for_the_log_probabilities_of_the_prompt(dialect: Dialect) -> None:
    """vLLM refuses them there."""
    assert drawing(dialect, replace(ASK, sampling=UNUSUAL))["prompt_logprobs"] is None


@pytest.mark.parametrize("dialect", Dialect)
def test_what_surrounds_a_request_is_sent_only_if_it_is_there(dialect: Dialect) -> None:
    assert {"priority", "cache_salt", "kv_transfer_params"}.isdisjoint(body(dialect, ASK))
    around = {"priority": -2, "cache_salt": "s", "kv_transfer_params": {"opaque": [1]}}
    sent = body(dialect, replace(ASK, priority=-2, cache_salt="s", kv_params={"opaque": [1]}))
    assert {name: sent[name] for name in around} == around


@pytest.mark.parametrize(("asked", "sent"), [(None, None), (0, 0), (1, 2), (5, 6), (19, 20), (20, 20), (25, 25)])
def test_generate_is_asked_for_one_log_probability_more_as_far_as_servers_allow(
    asked: int | None, sent: int | None
) -> None:
    """It counts the drawn token among the k."""
    ask = replace(ASK, sampling=SamplingParams(max_tokens=9, logprobs=asked))
    assert drawing(Dialect.GENERATE, ask)["logprobs"] == sent
    assert drawing(Dialect.COMPLETIONS, ask)["logprobs"] == asked


@pytest.mark.parametrize("dialect", Dialect)
def test_a_prefill_asks_for_one_greedy_token_and_a_ticket_without_a_stream(dialect: Dialect) -> None:
    ask = replace(ASK, sampling=UNUSUAL, seed=7, cache_salt="s", kv_params={"old": 1})
    sent = body(dialect, prefill_ask(ask))
    assert (sent["stream"], sent["cache_salt"], "stream_options" in sent) == (False, "s", False)
    assert sent["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    changed = {"n": 1, "max_tokens": 1, "temperature": 0.0}
    expected = DEFAULTS | changed
    assert {name: drawing(dialect, prefill_ask(ask))[name] for name in expected} == expected


@pytest.mark.parametrize("dialect", Dialect)
def test_the_log_probabilities_of_a_prompt_are_asked_for_with_one_token_and_without_a_stream(dialect: Dialect) -> None:
    ask = prompt_ask(replace(ASK, sampling=UNUSUAL, kv_params={"ticket": 1}))
    sent = drawing(dialect, ask)
    assert (sent["prompt_logprobs"], sent["max_tokens"], sent["n"], sent["logprobs"]) == (2, 1, 1, None)
    assert (ask.stream, ask.kv_params, ask.prompt) == (False, None, ASK.prompt)


def test_the_seeds_that_clients_send_stay_as_they_are() -> None:
    assert [signed_seed(seed) for seed in (0, 1, 42, 2**53, 2**63 - 2**32 - 1)] == [
        0,
        1,
        42,
        2**53,
        2**63 - 2**32 - 1,
    ]


def test_seeds_a_certain_distance_apart_are_one_to_vllm() -> None:
    assert signed_seed(5 + 2**63 - 2**32) == signed_seed(5)


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**32))
def test_no_child_is_unseeded_or_beyond_64_signed_bits(seed: int, n: int) -> None:
    assert signed_seed(seed) >= 0
    assert signed_seed(seed) + n - 1 < 2**63


@given(st.integers(0, 2**64 - 1), st.integers(0, 200))
def test_a_child_has_the_seed_of_a_single_request_but_where_the_count_begins_anew(seed: int, child: int) -> None:
    single = signed_seed((seed + child) % 2**64)
    counted = signed_seed(seed) + child
    assert single in (counted, counted - (2**63 - 2**32)) or seed + child >= 2**64

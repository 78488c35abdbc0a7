"""A choice's reasoning is separated from its content, streamed or not."""

import logging
from pathlib import Path
from typing import Any, get_args

import pytest

from motet.api.openai.chat_schema import ReasoningEffort
from motet.text.reasoning import ReasoningTags
from motet.text.tokenizer import Tokenizer
from motet.types import ANY_ANSWER, ThinkingBudget
from tests.api.calling import THINK, CallingServing, joined, unstreamed
from tests.api.serving import Serving, chunks, saying
from tests.error_response import assert_error
from tests.tiny_tokenizer import fake_answer, save_tiny_tokenizer

pytestmark = pytest.mark.anyio

ANSWERS = {
    "a thought": "<think>Hm. 日本?</think>Yes.",
    "space around the tags": "\n<think>\n Hm.\n</think>\n\n Yes.",
    "no thought": "Yes.",
    "a thought that never ends": "<think>Hm, hm",
    "nothing else": "<think>Hm.</think>",
    "a tag later on": "Yes. <think>Hm.</think>",
    "two thoughts": "<think>a</think>b<think>c</think>",
    "nothing": "",
}


async def test_a_thought_is_sent_under_two_names_and_counted(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(ANSWERS["a thought"], "Yes."))
    answer = (await served.chat(n=2)).json()
    thinking, plain = (choice["message"] for choice in answer["choices"])
    assert thinking["reasoning_content"] == thinking["reasoning"] == "Hm. 日本?"
    assert thinking["content"] == plain["content"] == "Yes."
    assert "reasoning_content" not in plain
    num_tokens = len(fake_answer("<think>Hm. 日本?</think>", eos=False))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}


@pytest.mark.parametrize("fields", [{}, {"include_reasoning": False}, {"separate_reasoning": False}])
async def test_streamed_choices_joined_are_the_unstreamed_choices(
    serve_tools: CallingServing, fields: dict[str, Any]
) -> None:
    served = await serve_tools(saying(*ANSWERS.values()))
    n = len(ANSWERS)
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = (await served.chat(n=n, **fields)).json()
    received = chunks(await served.chat(n=n, stream=True, stream_options=options, **fields))
    assert joined(received) == unstreamed(answer)
    assert received[-1]["usage"] == received[-2]["usage"] == answer["usage"]
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in received]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


async def test_a_thought_that_is_left_out_still_counts(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(ANSWERS["a thought"]))
    with_it, without = [(await served.chat(include_reasoning=shown)).json() for shown in (True, False)]
    assert without["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert without["usage"] == with_it["usage"]
    shown = chunks(await served.chat(include_reasoning=False, stream=True))
    assert all("reasoning" not in chunk["choices"][0]["delta"] for chunk in shown)


@pytest.mark.parametrize("stream", [False, True])
async def test_hidden_reasoning_is_in_no_token_and_log_probability(serve_tools: CallingServing, stream: bool) -> None:
    """Regression: log-probabilities and token ids showed the reasoning that the client must not see."""
    served = await serve_tools(saying(ANSWERS["a thought"]))
    fields = {"include_reasoning": False, "logprobs": True, "return_token_ids": True, "stream": stream}
    for more, shown in (({}, False), ({"separate_reasoning": False}, True)):
        answer = await served.chat(**fields, **more)
        assert answer.status_code == 200
        choices = [one["choices"][0] for one in (chunks(answer) if stream else [answer.json()])]
        assert any(choice.get("token_ids") for choice in choices) == shown
        assert any(choice["logprobs"] for choice in choices) == shown
    plain = await serve_tools(saying("Yes."), reasoning=None)
    answer = await plain.chat(**fields)
    choices = [one["choices"][0] for one in (chunks(answer) if stream else [answer.json()])]
    assert any(choice.get("token_ids") and choice["logprobs"] for choice in choices)


async def test_reasoning_can_stay_in_the_content(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(*ANSWERS.values()))
    answer = (await served.chat(n=len(ANSWERS), separate_reasoning=False)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == list(ANSWERS.values())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thought_that_the_prompt_opens_is_a_thought_from_its_first_token(
    serve_tools: CallingServing, stream: bool
) -> None:
    served = await serve_tools(saying("Hm.</think>Yes."))
    response = await served.chat(reasoning_effort="high", stream=stream)
    choices: dict[int, dict[str, Any]] = joined(chunks(response)) if stream else unstreamed(response.json())
    assert choices[0]["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
    }
    assert served.tokenizer.decode(served.engine.requests[0].prompt).endswith("<think>")


async def test_effort_is_ignored_with_a_log_line_if_the_template_does_not_use_it(
    serve_tools: CallingServing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "motet.api")
    plain, thinking = await serve_tools.serve(saying("Yes.")), await serve_tools(saying("Yes."))
    for server, effort, ignored in ((thinking, "low", 0), (plain, "none", 0), (plain, "low", 1)):
        assert (await server.chat(reasoning_effort=effort)).status_code == 200
        assert sum(record.message.startswith("reasoning_effort is ignored") for record in caplog.records) == ignored


@pytest.mark.parametrize("effort", get_args(ReasoningEffort))
async def test_every_effort_reaches_the_template_on_every_route(serve: Serving, tmp_path: Path, effort: str) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %} {{ reasoning_effort }}"
    served = await serve(tokenizer=Tokenizer.load(save_tiny_tokenizer(tmp_path, chat_template=template)))
    assert (await served.chat(reasoning_effort=effort)).status_code == 200
    response = {"input": "hi", "reasoning": {"effort": effort}}
    assert (await served.http.post("/v1/responses", json=response)).status_code == 200
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "output_config": {"effort": effort}}
    if effort not in ("none", "minimal"):  # Anthropic's API does not have them
        assert (await served.http.post("/v1/messages", json=message)).status_code == 200
    prompts = {served.tokenizer.decode(request.prompt) for request in served.engine.requests}
    assert [prompt.split()[-1] for prompt in prompts] == [effort]


async def test_the_tags_of_thoughts_are_text_of_a_model_that_does_not_think(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying(ANSWERS["a thought"]), reasoning=None)
    answer = (await served.chat()).json()
    assert answer["choices"][0]["message"]["content"] == ANSWERS["a thought"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_a_budget_of_reasoning_reaches_the_engine(serve_tools: CallingServing) -> None:
    tags = ReasoningTags(names=(), template_marks=(), opening_tags=("[",), closing_tags=("]",))
    served = await serve_tools(saying("[Hm.]Yes."), reasoning=tags)
    ((start,), (end,)) = (served.tokenizer.encode(tag, add_special_tokens=False) for tag in "[]")
    budget = ThinkingBudget(7, start, end)
    for fields, source in (({}, ANY_ANSWER), ({"structured_outputs": {"regex": "a"}}, "a")):
        assert (await served.chat(thinking_token_budget=7, **fields)).status_code == 200
        grammar = served.engine.requests[-1].sampling.grammar
        assert grammar is not None and grammar.thinking is not None
        assert (grammar.source, grammar.thinking.budget) == (source, budget)
        body = {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": 7, **fields}
        rendered = (await served.http.post("/v1/chat/completions/render", json=body)).json()
        assert (await served.http.post("/inference/v1/generate", json=rendered)).status_code == 200
        assert served.engine.requests[-1].sampling.grammar == grammar
    for unlimited in (-1, None):
        assert (await served.chat(thinking_token_budget=unlimited)).status_code == 200
        assert served.engine.requests[-1].sampling.grammar is None
    assert_error(await served.chat(thinking_token_budget=-2), status=400, param="thinking_token_budget")


@pytest.mark.parametrize("reasoning", [None, THINK], ids=["no reasoning", "tags of several tokens"])
async def test_a_budget_needs_tags_of_one_token(serve_tools: CallingServing, reasoning: ReasoningTags | None) -> None:
    served = await serve_tools(saying("Yes."), reasoning=reasoning)
    response = await served.chat(thinking_token_budget=7)
    assert_error(response, status=400, param="thinking_token_budget", code="unsupported_parameter")

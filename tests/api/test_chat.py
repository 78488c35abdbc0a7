"""Chat completions, through the official client where it can send the request, else raw."""

from pathlib import Path

import pytest
from openai.types.chat import ChatCompletionMessageParam

from motet.errors import EngineError
from motet.text.tokenizer import Tokenizer
from tests.api.serving import MODEL, SEED, Served, Serving, WatchedEngine, saying
from tests.tiny_tokenizer import IM_START_ID, fake_answer, save_tiny_tokenizer

pytestmark = pytest.mark.anyio

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def test_n_choices_come_in_order_with_the_prompt_counted_once(served: Served) -> None:
    answer = await served.openai.chat.completions.create(model=MODEL, messages=HI, n=3)
    assert [choice.message.content for choice in answer.choices] == ["hello 0", "hello 1", "hello 2"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(served.engine.requests[0].prompt)
    assert answer.usage.completion_tokens == 3 * len(fake_answer("hello 0"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_n_choices_are_one_group_of_the_engine(served: Served) -> None:
    await served.openai.chat.completions.create(model=MODEL, messages=HI, n=5)
    (request,) = served.engine.requests
    assert [choice.index for choice in request.choices] == [0, 1, 2, 3, 4]


async def test_answer_has_the_shape_of_openai(served: Served) -> None:
    answer = await served.openai.chat.completions.create(model=MODEL, messages=HI)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.system_fingerprint == served.engine.info.fingerprint
    assert answer.choices[0].logprobs is None


async def test_choice_i_has_the_seed_of_the_request_plus_i(served: Served) -> None:
    await served.openai.chat.completions.create(model=MODEL, messages=HI, n=3, seed=7)
    assert [choice.seed for choice in served.engine.requests[0].choices] == [7, 8, 9]


async def test_negative_seed_counts_modulo_two_to_the_64(served: Served) -> None:
    await served.openai.chat.completions.create(model=MODEL, messages=HI, n=3, seed=-2)
    assert [choice.seed for choice in served.engine.requests[0].choices] == [2**64 - 2, 2**64 - 1, 0]


async def test_without_a_seed_the_server_draws_one_a_request(served: Served) -> None:
    await served.openai.chat.completions.create(model=MODEL, messages=HI, n=2)
    assert [choice.seed for choice in served.engine.requests[0].choices] == [SEED, SEED + 1]


async def test_null_fields_count_as_absent(served: Served) -> None:
    response = await served.chat(
        n=None, temperature=None, stop=None, seed=None, stream=None, tools=None, logit_bias=None, unheard_of=None
    )
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 1


async def test_model_may_be_left_out(served: Served) -> None:
    response = await served.chat()
    assert response.status_code == 200
    assert response.json()["model"] == MODEL


async def test_ignored_fields_pass(served: Served) -> None:
    response = await served.chat(
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        stream=True,
        stream_options={"include_obfuscation": False},
    )
    assert response.status_code == 200


async def test_fields_at_their_default_pass(served: Served) -> None:
    response = await served.chat(
        tools=[], tool_choice="auto", response_format={"type": "text"}, modalities=["text"], parallel_tool_calls=True
    )
    assert response.status_code == 200


async def test_sampling_fields_reach_the_engine(served: Served) -> None:
    await served.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={"5": -100, "7": 2.5},
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[9],
        max_tokens=10,
        cache_salt="salt",
        priority=3,
    )
    (request,) = served.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.5)
    assert sampling.repetition_penalty == 1.25
    assert sampling.logit_bias == {5: -100.0, 7: 2.5}
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, (9,))
    assert sampling.max_tokens == 10
    assert (request.cache_salt, request.priority) == ("salt", 3)


async def test_top_k_minus_one_means_off(served: Served) -> None:
    await served.chat(top_k=-1)
    assert served.engine.requests[0].sampling.top_k == 0


async def test_max_completion_tokens_wins_over_max_tokens(served: Served) -> None:
    answer = await served.openai.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=500, max_completion_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


async def test_without_max_tokens_a_choice_may_fill_the_model(served: Served) -> None:
    await served.openai.chat.completions.create(model=MODEL, messages=HI)
    (request,) = served.engine.requests
    assert request.sampling.max_tokens == served.engine.info.max_model_len - len(request.prompt)


async def test_prompt_is_the_rendered_template(served: Served) -> None:
    await served.openai.chat.completions.create(model=MODEL, messages=HI)
    prompt = list(served.engine.requests[0].prompt)
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert served.tokenizer.decode(prompt, skip_special_tokens=False) == expected
    assert prompt[0] == IM_START_ID


async def test_developer_speaks_as_system_and_text_parts_are_joined(served: Served) -> None:
    await served.openai.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "short"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    )
    text = served.tokenizer.decode(served.engine.requests[0].prompt, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nshort<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n")


async def test_last_message_can_be_continued(served: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}],
        "continue_final_message": True,
    }
    response = await served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    text = served.tokenizer.decode(served.engine.requests[0].prompt, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nwell")


async def test_variables_of_the_request_reach_the_chat_template(serve: Serving, tmp_path: Path) -> None:
    folder = save_tiny_tokenizer(tmp_path, chat_template="{{ mood }}: {{ messages[0].content }}")
    served = await serve(tokenizer=Tokenizer.load(folder))
    response = await served.chat(chat_template_kwargs={"mood": "good"})
    assert response.status_code == 200
    assert served.tokenizer.decode(served.engine.requests[0].prompt) == "good: hi"


async def test_stop_string_ends_one_choice_and_is_named(serve: Serving) -> None:
    served = await serve(saying("one END two", "three four"))
    response = await served.chat(n=2, stop="END")
    first, second = response.json()["choices"]
    assert (first["message"]["content"], first["finish_reason"], first["stop_reason"]) == ("one ", "stop", "END")
    assert (second["message"]["content"], second["stop_reason"]) == ("three four", None)


async def test_stop_string_may_stay_in_the_output(serve: Serving) -> None:
    served = await serve(saying("one END two"))
    response = await served.chat(stop=["END", "zzz"], include_stop_str_in_output=True)
    assert response.json()["choices"][0]["message"]["content"] == "one END"


async def test_logprobs_hold_tokens_bytes_and_alternatives(serve: Serving) -> None:
    served = await serve(saying("é"))
    answer = await served.openai.chat.completions.create(
        model=MODEL, messages=HI, logprobs=True, top_logprobs=2, max_tokens=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.bytes for entry in logprobs.content] == [[0xC3], [0xA9]]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2]
    assert {entry.logprob for entry in logprobs.content} == {-0.5}


async def test_logprobs_without_top_logprobs_have_no_alternatives(served: Served) -> None:
    answer = await served.openai.chat.completions.create(model=MODEL, messages=HI, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert [entry.top_logprobs for entry in logprobs.content] == [[]] * len(logprobs.content)


async def test_token_ids_are_returned_when_asked_for(served: Served) -> None:
    body = (await served.chat(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == list(served.engine.requests[0].prompt)
    assert body["choices"][0]["token_ids"] == fake_answer("hello 0")


async def test_token_ids_are_not_sent_unasked(served: Served) -> None:
    body = (await served.chat()).json()
    assert "prompt_token_ids" not in body
    assert "token_ids" not in body["choices"][0]


async def test_error_of_the_engine_after_some_steps_still_has_its_status(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(fail_after={2: EngineError("the engine broke")}))
    response = await served.chat()
    assert response.status_code == 500
    assert response.json() == {
        "error": {"message": "the engine broke", "type": "server_error", "param": None, "code": "engine_error"}
    }

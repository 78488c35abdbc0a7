"""Requests with which a hostile client can try to delay the streams of other clients. Most have several megabytes."""

import json
from collections.abc import Callable, Mapping, Sequence

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES, MESSAGES, COUNT_TOKENS = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
RENDER, TOKENIZE, SGLANG, SCORE = "/v1/chat/completions/render", "/tokenize", "/generate", "/v1/score"
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"
CALLS = [{"type": "function", "function": {"name": "f"}}]
MESSAGE = {"role": "user", "content": "x"}
CALLED = [
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
]
IDS = [*range(1000, 1128)]
Make = Callable[[], bytes]
"""Makes a body. Bodies are made when they are sent, because all of them together have 150 MB."""
TEXT_BLOCK = '{"type":"text","text":"x"}'
SLOW_PATTERN = "[ab]*a[ab]{20}[^x]*([a-z]{100}|.)"
"""A pattern for which RE2 cannot build a small automaton, so that it tries all of its instructions at each byte."""
POSTERIORS = {"any_of": [{"posterior": 0.999_999_9} for _ in range(8)]}
BIASES, ALLOWED = {str(number): 1 for number in range(16_000)}, list(range(16_000))
ENUM = [number + 0.123456789 for number in range(12_000)]
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def wide(num_properties: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(num_properties)}}


def tools(count: int) -> list[dict[str, object]]:
    return [{"type": "function", "function": {"name": f"f{number}", "parameters": wide(60)}} for number in range(count)]


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": [MESSAGE], "max_tokens": 20, **fields}).encode()


def message(**fields: object) -> bytes:
    return json.dumps({"messages": [MESSAGE], "max_tokens": 20, **fields}).encode()


def steered(group: object, **fields: object) -> bytes:
    """Returns a chat of many choices with a policy."""
    return chat(**{"n": 256, "max_tokens": 60, "group": group, **fields})


def lists(num_lists: int) -> str:
    """Returns arguments of a call: JSON with empty lists."""
    return f'{{"a":[{"[]," * num_lists}[]]}}'


def calls(arguments: str, *, times: int = 1) -> list[object]:
    """Returns a conversation after one answer with equal calls."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call] * times}, MESSAGE]


def use_of_tool(arguments: object) -> list[object]:
    """Returns a conversation of `/v1/messages` after an answer with a call."""
    block = {"type": "tool_use", "id": "1", "name": "f", "input": arguments}
    return [MESSAGE, {"role": "assistant", "content": [block]}, MESSAGE]


def nested(times: int) -> dict[str, object]:
    """Returns nested conditions."""
    inner: dict[str, object] = {"finished": 1}
    for _ in range(times):
        inner = {"any_of": [inner]}
    return inner


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def tokens(ids: Sequence[int]) -> bytes:
    return json.dumps({"sampling_params": {}, "token_ids": ids}).encode()


def scored(length: int, **sampling: object) -> bytes:
    """Returns a request for log-probabilities of a long prompt."""
    return body(token_ids=[5] * length, sampling_params={"max_tokens": 1, **sampling})


def scored_texts(new_tokens: int = 1, **fields: object) -> bytes:
    """Returns a request for log-probabilities in SGLang's form, with the text of each token."""
    given = {"return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True, **fields}
    return body(sampling_params={"max_new_tokens": new_tokens}, **given)


def padded(first: str, piece: str, *, last: str, size: int = 7 * 2**20) -> bytes:
    """Returns a body of about `size` bytes, by default a little less than a server accepts."""
    return (first + piece * (size // len(piece)) + last).encode()


REFUSED: Mapping[str, tuple[str, Make, str | None]] = {
    "empty messages": (CHAT, lambda: padded('{"messages":[', "{},", last="{}]}"), "messages"),
    "messages": (CHAT, lambda: padded('{"messages":[', json.dumps(MESSAGE) + ",", last="{}]}"), "messages"),
    "tool calls": (
        CHAT,
        lambda: padded('{"messages":[{"role":"assistant","tool_calls":[', json.dumps(CALLS[0]) + ",", last="{}]}]}"),
        "messages",
    ),
    "text parts": (
        CHAT,
        lambda: padded('{"messages":[{"role":"user","content":[', '{"type":"text","text":"x"},', last="{}]}]}"),
        "messages",
    ),
    "unknown keys": (
        CHAT,
        lambda: ("{" + ",".join(f'"k{number}":1' for number in range(500_000)) + "}").encode(),
        "k40000",
    ),
    "some unknown keys": (
        CHAT,
        lambda: ("{" + ",".join(f'"k{number}":1' for number in range(9000)) + "}").encode(),
        "k0",
    ),
    "metadata": (
        CHAT,
        lambda: json.dumps(
            {"messages": [MESSAGE], "metadata": {f"k{number}": "x" for number in range(400_000)}}
        ).encode(),
        "metadata",
    ),
    "empty arrays": (CHAT, lambda: padded('{"messages":[', "[],", last="[]]}"), "messages"),
    "depth": (CHAT, lambda: b'{"messages":' + b"[" * 7_000_000, "messages"),
    "items": (RESPONSES, lambda: padded('{"input":[', json.dumps(MESSAGE) + ",", last="{}]}"), "input"),
    "unknown roles": (CHAT, lambda: padded('{"messages":["', 'x","', last='"]}', size=150_000), "messages[0]"),
    "included": (
        RESPONSES,
        lambda: padded('{"input":"x","include":["', 'x","', last='"]}', size=150_000),
        "include[0]",
    ),
    "words for tokens": (
        GENERATE,
        lambda: padded('{"sampling_params":{},"token_ids":["', 'x","', last='"]}', size=300_000),
        "token_ids[0]",
    ),
    "strings": (GENERATE, lambda: padded('{"sampling_params":{},"token_ids":["', 'x","', last='"]}'), "token_ids"),
    "values": (GENERATE, lambda: padded('{"sampling_params":{},"token_ids":[', "1,", last="1]}"), "token_ids"),
    "long stop string": (
        CHAT,
        lambda: padded('{"messages":[{"role":"user","content":"x"}],"stop":["', "x", last='"]}'),
        "stop",
    ),
    "stop tokens": (
        CHAT,
        lambda: padded('{"messages":[{"role":"user","content":"x"}],"stop_token_ids":[', "1,", last="1]}"),
        "stop_token_ids",
    ),
    "stop tokens next to token ids": (
        COMPLETIONS,
        lambda: body(prompt="x", stop_token_ids=[1] * 999_000),
        "stop_token_ids",
    ),
    "biases": (
        CHAT,
        lambda: json.dumps(
            {"messages": [MESSAGE], "logit_bias": {str(number): 1 for number in range(30_000)}}
        ).encode(),
        "logit_bias",
    ),
    "no JSON": (CHAT, lambda: padded("", "[1,", last=""), None),
    "long numbers": (
        GENERATE,
        lambda: padded('{"sampling_params":{},"token_ids":[', "9" * 4000 + ",", last="9]}"),
        "token_ids",
    ),
    "long choices": (
        CHAT,
        lambda: chat(structured_outputs={"choice": ["x" * 200] * 30_000}),
        "structured_outputs.choice",
    ),
    "lists in arguments": (CHAT, lambda: chat(messages=calls(lists(100_000))), ARGUMENTS),
    "millions of lists in arguments": (CHAT, lambda: chat(messages=calls(lists(2_600_000))), ARGUMENTS),
    "lists in the arguments of many calls": (
        CHAT,
        lambda: chat(messages=calls(lists(900), times=2000)),
        "messages[0].tool_calls[11].function.arguments",
    ),
    "long numbers in arguments": (
        CHAT,
        lambda: chat(messages=calls(f'{{"a":[{",".join(["9" * 4200] * 1900)}]}}')),
        ARGUMENTS,
    ),
    "fractions in arguments": (CHAT, lambda: chat(messages=calls(f'{{"a":[{"1.23456789," * 39_000}1]}}')), "messages"),
    "a text in arguments": (CHAT, lambda: chat(messages=calls(f'{{"a":"{"abc de " * 85_000}"}}')), "messages"),
    "ordinary calls": (CHAT, lambda: chat(messages=calls('{"a":1}', times=3300)), "messages"),
    "lists in arguments, rendered": (RENDER, lambda: chat(messages=calls(lists(1_000_000))), ARGUMENTS),
    "lists in arguments, tokenised": (TOKENIZE, lambda: body(messages=calls(lists(1_000_000))), ARGUMENTS),
    "calls, tokenised": (TOKENIZE, lambda: body(messages=calls('{"a":1}', times=3300)), "messages"),
    "results of tools": (
        CHAT,
        lambda: chat(messages=[MESSAGE, *[{"role": "tool", "content": "x" * 800, "tool_call_id": "1"}] * 9000]),
        "messages",
    ),
    "calls of a response": (RESPONSES, lambda: body(input=CALLED[:1] * 9000), "input"),
    "lists in a call of a response": (
        RESPONSES,
        lambda: body(input=[{**CALLED[0], "arguments": lists(1_000_000)}, MESSAGE]),
        "input",
    ),
    "tools in namespaces": (
        RESPONSES,
        lambda: body(
            input="x",
            tools=[
                {
                    "type": "namespace",
                    "name": f"n{number}",
                    "tools": [{"type": "function", "name": f"f{inner}"} for inner in range(120)],
                }
                for number in range(80)
            ],
        ),
        "tools",
    ),
    "values without tokens": (CHAT, lambda: chat(chat_template_kwargs={"a": [1] * 45_000}), "chat_template_kwargs"),
    "long numbers of 100 digits": (COMPLETIONS, lambda: body(prompt=[10**99] * 79_000), "prompt"),
    "fractions in a schema": (
        COMPLETIONS,
        lambda: body(prompt="x", structured_outputs={"json": {"enum": [n + 0.123456789 for n in range(400_000)]}}),
        "structured_outputs.json",
    ),
    "strings in a schema": (
        COMPLETIONS,
        lambda: body(prompt="x", structured_outputs={"json": {"enum": [f"{number}" for number in range(90_000)]}}),
        "structured_outputs.json",
    ),
    "wrong biases": (CHAT, lambda: chat(logit_bias={str(number): "x" for number in range(16_000)}), "logit_bias.0"),
    "a long value of a choice": (CHAT, lambda: chat(reasoning_effort="x" * 7_000_000), "reasoning_effort"),
    "a long text to SGLang's route": (SGLANG, lambda: body(text="x y " * 1_700_000), "text"),
    "a worker with lists for an address": ("/workers", lambda: body(url=[[]] * 200_000), "url"),
    "a long name": (CHAT, lambda: chat(**{"k" * 7_000_000: 1}), f"{'k' * 1000} ... {'k' * 1000}"),
    "a million tokens": (GENERATE, lambda: tokens([5] * 999_000), "token_ids"),
    "a million tokens, one of them wrong": (GENERATE, lambda: tokens([5] * 999_000 + [10**9]), "token_ids"),
    "a long text": (COMPLETIONS, lambda: body(prompt="x y " * 1_700_000), "prompt"),
    "many prompts": (COMPLETIONS, lambda: body(prompt=["x"] * 60_000), "prompt"),
    "tokens for a text": ("/detokenize", lambda: body(tokens=[5] * 960_000), "tokens"),
    "turns": (CHAT, lambda: chat(messages=[MESSAGE] * 1900), "messages"),
    "items of calls": (RESPONSES, lambda: body(input=CALLED * 4000), "input"),
    "128 large tools": (CHAT, lambda: chat(tools=tools(128)), "messages"),
    "128 large tools, one to be called": (CHAT, lambda: chat(tools=tools(128), tool_choice="required"), "messages"),
    "properties": (CHAT, lambda: chat(structured_outputs={"json": wide(5000)}), "structured_outputs.json"),
    "nested schema": (
        CHAT,
        lambda: chat(structured_outputs={"json": '{"items":' * 4000 + "{}" + "}" * 4000}),
        "structured_outputs.json",
    ),
    "conditions": (CHAT, lambda: steered({"stop_when": {"any_of": [{"finished": 1}] * 20_000}}), "group"),
    "conditions inside one another": (
        CHAT,
        lambda: steered({"stop_when": nested(3)}),
        "group.stop_when.any_of[0].any_of",
    ),
    "a long pattern": (
        CHAT,
        lambda: steered({"vote": True, "extract": {"regex": "a" * 7_000_000}}),
        "group.extract.regex",
    ),
    "a wide pattern": (
        CHAT,
        lambda: steered({"vote": True, "extract": {"regex": "\\pL{1000}" * 90}}),
        "group.extract.regex",
    ),
    "a long pointer": (
        CHAT,
        lambda: steered({"vote": True, "extract": {"json_pointer": "/a" * 3_000_000}}),
        "group.extract.json_pointer",
    ),
    "unknown keys of a policy": (CHAT, lambda: steered({f"k{number}": 1 for number in range(9000)}), "group.k0"),
    "a wide window": (CHAT, lambda: steered({"confidence": {"window": 2**62, "below": 1}}), "group.confidence.window"),
    "turns of a message": (
        MESSAGES,
        lambda: padded('{"max_tokens":1,"messages":[', json.dumps(MESSAGE) + ",", last="{}]}"),
        None,
    ),
    "blocks of a message": (
        MESSAGES,
        lambda: padded('{"max_tokens":1,"messages":[{"role":"user","content":[', TEXT_BLOCK + ",", last="{}]}]}"),
        None,
    ),
    "blocks of a system": (
        COUNT_TOKENS,
        lambda: padded(
            '{"messages":[{"role":"user","content":"x"}],"system":[', TEXT_BLOCK + ",", last="{}]}", size=900_000
        ),
        None,
    ),
    "a deeply nested call": (
        MESSAGES,
        lambda: (
            b'{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f",'
            b'"input":' + b'{"a":' * 1_000_000
        ),
        None,
    ),
    "a long text to count": (
        COUNT_TOKENS,
        lambda: message(messages=[{"role": "user", "content": "x y " * 10**6}]),
        None,
    ),
    "128 large tools of a message": (
        MESSAGES,
        lambda: message(tools=[{"name": f"f{number}", "input_schema": wide(60)} for number in range(128)]),
        None,
    ),
    "numbers in a use of a tool": (
        MESSAGES,
        lambda: message(messages=use_of_tool({"a": [[1] * 1000] * 900})),
        None,
    ),
    "numbers in a use of a tool, counted": (
        COUNT_TOKENS,
        lambda: body(messages=use_of_tool({"a": [[1] * 1000] * 900})),
        None,
    ),
    "fractions in a use of a tool": (
        COUNT_TOKENS,
        lambda: body(messages=use_of_tool({"a": [n + 0.123456789 for n in range(39_000)]})),
        None,
    ),
    "results of tools in a message": (
        MESSAGES,
        lambda: message(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x" * 800}] * 4900,
                }
            ]
        ),
        None,
    ),
    "long stop sequences": (MESSAGES, lambda: message(stop_sequences=["x" * 100_000] * 60), None),
}
"""Requests that are refused, by name: route, function that makes the body, and the field that the error names. The
field is None for messages, whose errors name the field in their text."""

ANSWERED: Mapping[str, tuple[str, Make]] = {
    "250 prompts of 3900 tokens": (COMPLETIONS, lambda: body(prompt=[[5] * 3900] * 250, max_tokens=1)),
    "250 prompts, scored": (COMPLETIONS, lambda: body(prompt=[[5] * 3900] * 250, max_tokens=0, echo=True, logprobs=1)),
    "250 prompts with biases": (
        COMPLETIONS,
        lambda: body(
            prompt=[[5] * (number + 1) for number in range(250)],
            max_tokens=1,
            logit_bias=BIASES,
            allowed_token_ids=ALLOWED,
        ),
    ),
    "100 prompts with biases": (
        COMPLETIONS,
        lambda: body(
            prompt=[[5] * (number + 1) for number in range(100)],
            max_tokens=1,
            logit_bias=BIASES,
            allowed_token_ids=ALLOWED,
        ),
    ),
    "250 prompts with biases, rendered": (
        "/v1/completions/render",
        lambda: body(prompt=["x"] * 250, logit_bias=BIASES, allowed_token_ids=ALLOWED),
    ),
    "a schema of a response": (
        RESPONSES,
        lambda: body(
            input="x",
            max_output_tokens=20,
            stream=True,
            text={"format": {"type": "json_schema", "name": "f", "schema": {"enum": ENUM}}},
        ),
    ),
    "a schema of fractions": (CHAT, lambda: chat(structured_outputs={"json": {"enum": ENUM}})),
    "long reasoning": (
        CHAT,
        lambda: chat(messages=[{"role": "assistant", "content": "x", "reasoning": "x y " * 1_700_000}, MESSAGE]),
    ),
    "prompts with alternatives": (
        COMPLETIONS,
        lambda: body(prompt=[[5] * 3900] * 20, max_tokens=1, prompt_logprobs=20),
    ),
    "a text for tokens": (
        "/tokenize",
        lambda: json.dumps({"prompt": "hello world " * 4000, "return_token_strs": True}).encode(),
    ),
    "wide variables": (CHAT, lambda: chat(chat_template_kwargs={f"k{number}": number for number in range(39_000)})),
    "spaces": (CHAT, lambda: b"{" + b" " * 7_000_000 + chat()[1:]),
    "256 choices, whole": (CHAT, lambda: chat(n=256, max_tokens=200)),
    "256 choices, alternatives": (CHAT, lambda: chat(n=256, logprobs=True, top_logprobs=20, stream=True)),
    "256 choices, 128 alternatives": (CHAT, lambda: chat(n=256, logprobs=True, logprob_token_ids=IDS, stream=True)),
    "256 choices, 128 alternatives, whole": (CHAT, lambda: chat(n=256, logprobs=True, logprob_token_ids=IDS)),
    "a prompt with alternatives, whole": (GENERATE, lambda: scored(3900, prompt_logprobs=20)),
    "a repeated prompt with alternatives": (
        COMPLETIONS,
        lambda: body(prompt=[5] * 3900, max_tokens=1, echo=True, logprobs=20, stream=True),
    ),
    "a scored chat, streamed": (
        CHAT,
        lambda: chat(
            messages=[{"role": "user", "content": "x " * 3800}], prompt_logprobs=20, max_tokens=1, stream=True
        ),
    ),
    "250 continuations": (
        SCORE,
        lambda: body(prompt=[5] * 3900, continuations=[[6, number] for number in range(250)]),
    ),
    "250 continuations of a long text": (
        SCORE,
        lambda: body(prompt="hello world " * 1800, continuations=[f" and {number}" for number in range(250)]),
    ),
    "named tokens of scored prompts": (
        SGLANG,
        lambda: scored_texts(input_ids=[[5] * 3900] * 3, token_ids_logprob=IDS, top_logprobs_num=20),
    ),
    "200 scored texts": (SGLANG, lambda: scored_texts(text=["x y " * 200] * 200, top_logprobs_num=20)),
    "a stream that repeats a scored prompt": (
        SGLANG,
        lambda: scored_texts(input_ids=[5] * 290, top_logprobs_num=20, stream=True, new_tokens=5),
    ),
    "100 choices, each with its scored prompt": (
        COMPLETIONS,
        lambda: body(prompt=[5] * 900, n=100, max_tokens=1, echo=True, logprobs=20),
    ),
    "a Response with alternatives": (
        RESPONSES,
        lambda: body(
            input="x", max_output_tokens=400, top_logprobs=20, include=["message.output_text.logprobs"], stream=True
        ),
    ),
    "a stream that repeats its tokens": (
        SGLANG,
        lambda: body(
            input_ids=[5],
            stream=True,
            sampling_params={"max_new_tokens": 300},
            return_logprob=True,
            top_logprobs_num=20,
        ),
    ),
    "256 choices, usage": (CHAT, lambda: chat(n=256, stream=True, stream_options=USAGE)),
    "64 stop strings": (CHAT, lambda: chat(n=256, stream=True, stop=[f"{number}{'zq' * 50}" for number in range(64)])),
    "16,000 biases": (CHAT, lambda: chat(n=64, logit_bias={str(number): 1 for number in range(16_000)})),
    "calls for 64": (CHAT, lambda: chat(n=64, tools=tools(1), stream=True)),
    "256 values by a slow pattern": (CHAT, lambda: steered({"vote": True, "extract": {"regex": SLOW_PATTERN}})),
    "240 prompts, their values by a slow pattern": (
        COMPLETIONS,
        lambda: body(prompt=[[5]] * 240, max_tokens=200, group={"vote": True, "extract": {"regex": SLOW_PATTERN}}),
    ),
    "256 long answers, 8 conditions": (
        CHAT,
        lambda: steered({"stop_when": POSTERIORS, "extract": "last_line"}, max_tokens=200, stream=True),
    ),
    "256 choices, one by one": (CHAT, lambda: steered({"start": 1, "extract": "boxed", "vote": True}, max_tokens=1)),
    "256 choices, step by step": (CHAT, lambda: steered({"deterministic": True}, max_tokens=200, stream=True)),
    "256 choices, their confidence": (
        CHAT,
        lambda: steered({"confidence": {"window": 8192, "warm_up": 128, "percentile": 50}}, stream=True),
    ),
    "250 prompts, steered": (
        COMPLETIONS,
        lambda: body(
            prompt=[[5] * 900] * 250, n=4, max_tokens=2, group={"start": 1, "vote": True, "extract": "last_number"}
        ),
    ),
    "kept for an hour": (CHAT, lambda: chat(n=4, max_tokens=1, keep_s=3600, stop=["zq" * 500] * 16)),
    "a message": (MESSAGES, lambda: message(max_tokens=200, stream=True)),
    "a message of many blocks": (
        MESSAGES,
        lambda: message(messages=[{"role": "user", "content": [json.loads(TEXT_BLOCK)] * 1800}], max_tokens=1),
    ),
    "tokens of a long text": (
        COUNT_TOKENS,
        lambda: body(messages=[{"role": "user", "content": "hello world " * 1900}], system="x " * 100),
    ),
}
"""Requests that are answered, by name: each has the maximum that a client is allowed to request in some respect."""

"""Requests of the clients of the soak run. All of them follow from a seed.

seeded_requests    sent repeatedly; their answers must always equal the answers without faults
fresh_request      a prompt that is not cached, and often a grammar that was not compiled before
short_calls        routes that generate nothing
refused_calls      invalid requests, each with the status and the error code that it must get
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bench.chaos.mixed_requests import CHAT, COMPLETIONS, SUBJECTS, RepeatedRequest, mixed_requests
from bench.chaos.received_answers import ReceivedAnswer
from bench.soak.policy_groups import MESSAGES
from motet.api.page import PAGE_ROUTES

RESPONSES, GENERATE = "/v1/responses", "/inference/v1/generate"
SIZES = (1, 1, 2, 4, 8, 16, 64)
LENGTHS = (8, 16, 32)
MIXED = 14
"""Number of seeded requests of the same kinds as in the chaos run."""
NAMES = ("Anna", "Boris", "Carla", "Dmitri", "Edith", "Farid", "Greta", "Hugo")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": list(NAMES)}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
FLAT_FORMAT = {"type": "json_schema", "name": "person", "schema": SCHEMA}
FUNCTION = {"name": "look_up", "description": "Looks up a person.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS = [{"type": "function", **FUNCTION}]


@dataclass(frozen=True)
class StatusCall:
    """A request whose answer is checked only for its status, and for the `code` of an error."""

    name: str
    method: str
    path: str
    status: int = 200
    code: str | None = None
    body: object = None
    """Body to send as JSON. Bytes are sent unchanged; None means no body."""
    headers: Mapping[str, str] | None = None
    """Headers instead of the client's key."""


@dataclass(frozen=True)
class FreshRequest:
    """A request that is sent once. Each of its complete texts must match `pattern`."""

    request: RepeatedRequest
    pattern: re.Pattern[str] | None

    def matches(self, answer: ReceivedAnswer) -> bool:
        """Returns True if every text that ended by itself matches the pattern."""
        complete = [answer.texts[index] for index, reasons in answer.finishes.items() if reasons == ["stop"]]
        return self.pattern is None or all(self.pattern.fullmatch(text) for text in complete)


def chat(content: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def seeded_requests(seed: int) -> list[RepeatedRequest]:
    """Returns requests to all routes that generate, streamed and not streamed, with grammars, tools and other
    fields."""
    dice = random.Random(seed)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    person = "Invent a person."
    name = {"structured_outputs": {"choice": list(NAMES)}}
    date = {"structured_outputs": {"regex": "(19|20)[0-9]{2}-[01][0-9]"}}
    required = {"tools": TOOLS, "tool_choice": "required"}
    tokens = [dice.randrange(20, 250) for _ in range(150)]
    bodies: list[tuple[str, dict[str, object]]] = [
        (CHAT, chat(person, n=4, max_tokens=40, response_format=FORMAT)),
        (CHAT, chat(person, n=8, max_tokens=40, response_format=FORMAT, **usage)),
        (CHAT, chat("When?", n=8, max_tokens=16, **date, **usage)),
        (COMPLETIONS, {"prompt": "My name is", "n": 64, "max_tokens": 8, **name}),
        (COMPLETIONS, {"prompt": ["My name is", "Her name is"], "n": 16, "max_tokens": 8, **name, **usage}),
        (CHAT, chat("Look up Anna.", n=4, max_tokens=32, tools=TOOLS, **usage)),
        (CHAT, chat("Look up Anna, please.", n=2, max_tokens=32, tools=TOOLS, tool_choice="auto")),
        (CHAT, chat("Look up Hugo, he is 40.", n=2, max_tokens=48, **required)),
        (CHAT, chat("Look up Greta, she is 30.", n=8, max_tokens=48, **required, **usage)),
        (COMPLETIONS, {"prompt": "The sea", "n": 3, "max_tokens": 16, "logprobs": 3, "echo": True}),
        (COMPLETIONS, {"prompt": "The sky", "n": 2, "best_of": 6, "max_tokens": 16}),
        (CHAT, chat("Sing.", n=5, max_tokens=24, logprobs=True, top_logprobs=3, **usage)),
        (CHAT, chat("Count.", n=32, max_tokens=12, stop=["\n", "."], presence_penalty=0.5, min_p=0.05, **usage)),
        (RESPONSES, {"input": "Tell me about bread. " * 30, "max_output_tokens": 24}),
        (RESPONSES, {"input": "Tell me about clocks.", "max_output_tokens": 24, "stream": True}),
        (RESPONSES, {"input": person, "max_output_tokens": 40, "text": {"format": FLAT_FORMAT}}),
        (
            RESPONSES,
            {"input": "Look up Carla.", "max_output_tokens": 48, "stream": True, **required, "tools": FLAT_TOOLS},
        ),
        (GENERATE, {"token_ids": tokens, "sampling_params": {"n": 4, "max_tokens": 16}}),
        (GENERATE, {"token_ids": tokens[:40], "sampling_params": {"n": 16, "max_tokens": 16, "logprobs": 2}, **usage}),
        (GENERATE, {"token_ids": tokens[:60], "sampling_params": {"max_tokens": 4, "prompt_logprobs": 1}}),
    ]
    requests = mixed_requests(MIXED, seed=seed, sizes=SIZES, lengths=LENGTHS)
    for place, (path, body) in enumerate(bodies, start=len(requests)):
        sampling = body.get("sampling_params", body)
        assert isinstance(sampling, dict)
        sampling["seed"] = dice.randrange(2**31)
        requests.append(RepeatedRequest(f"{place}: {path}", path, body))
    return requests


def fresh_request(dice: random.Random) -> FreshRequest:
    """Returns a request with a new prompt, in every second case with a new grammar."""
    text = f"{dice.choice(NAMES)} has the number {dice.randrange(2**40)} and knows {dice.choice(SUBJECTS)}. "
    text *= dice.choice((1, 1, 12, 20))
    body: dict[str, object] = {
        "n": dice.choice(SIZES),
        "max_tokens": dice.choice(LENGTHS),
        "stream": dice.random() < 0.6,
    }
    form = dice.choice((None, None, None, "choice", "regex", "json"))
    pattern: str | None = None
    number = dice.randrange(10**6)
    if form == "choice":
        body["structured_outputs"] = {"choice": [f"yes {number}", f"no {number}"]}
        pattern = f"(yes|no) {number}"
    elif form == "regex":
        pattern = f"[a-f]{{2}} {number}"
        body["structured_outputs"] = {"regex": pattern}
    elif form == "json":
        key = f"k{number}"
        schema = {"type": "object", "properties": {key: {"type": "boolean"}}, "required": [key]}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        pattern = rf'\{{\s*"{key}"\s*:\s*(true|false)\s*\}}'
    route = dice.choice((CHAT, COMPLETIONS))
    body |= chat(text) if route == CHAT else {"prompt": text}
    name = f"fresh {form or 'text'}"
    return FreshRequest(RepeatedRequest(name, route, body), re.compile(pattern) if pattern else None)


def filling_requests(number: int) -> list[RepeatedRequest]:
    """Returns requests with a number of grammars that no other request has: schemas, which take the most memory."""
    requests = []
    for place in range(number):
        schema = {"type": "object", "properties": {f"filling{place}": {"type": "boolean"}}}
        form = {"type": "json_schema", "json_schema": {"name": "filling", "schema": schema}}
        requests.append(RepeatedRequest("filling", CHAT, chat("x", max_tokens=1, response_format=form)))
    return requests


def wide_requests(number: int) -> list[RepeatedRequest]:
    """Returns requests with the maximum number of choices, for a step of maximum width."""
    return [
        RepeatedRequest(
            "wide", COMPLETIONS, {"prompt": f"{place} x", "n": max(SIZES), "max_tokens": 16, "ignore_eos": True}
        )
        for place in range(number)
    ]


def heavy_grammar(dice: random.Random) -> StatusCall:
    """Returns a request whose grammar is first compiled in a trial process."""
    number = dice.randrange(10**6)
    properties = {f"k{place}": {"type": "string", "pattern": f"^[a-z]{{3}}{number + place}$"} for place in range(9)}
    schema = {"type": "object", "properties": properties, "required": ["k0"]}
    form = {"type": "json_schema", "json_schema": {"name": "heavy", "schema": schema}}
    return StatusCall("a heavy grammar", "POST", CHAT, body=chat("Fill it.", max_tokens=4, response_format=form))


def short_calls(model: str) -> list[StatusCall]:
    """Returns calls of the routes that generate nothing, on a server with this model."""
    messages = chat("Hello")["messages"]
    return [
        StatusCall("tokenize", "POST", "/tokenize", body={"prompt": "the sea " * 50, "return_token_strs": True}),
        StatusCall("tokenize", "POST", "/tokenize", body={"messages": messages, "tools": TOOLS}),
        StatusCall("detokenize", "POST", "/detokenize", body={"tokens": [30, 400, 500]}),
        StatusCall("count tokens", "POST", f"{MESSAGES}/count_tokens", body={"messages": messages}),
        *(StatusCall("page", "GET", path, headers={}) for path in sorted(PAGE_ROUTES)),
        *(StatusCall("models", "GET", path) for path in ("/v1/models", f"/v1/models/{model}")),
        *(StatusCall("state", "GET", path) for path in ("/health", "/ping", "/ready", "/version")),
        *(StatusCall("status", "GET", path) for path in ("/status", "/workers", "/metrics")),
    ]


def refused_calls() -> list[StatusCall]:
    """Returns invalid requests of many kinds."""
    bad_schema = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"contains": {"type": "null"}}}}
    named = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}
    bodies: list[tuple[str, str | None, object]] = [
        (CHAT, "unknown_parameter", chat("x", colour="blue")),
        (CHAT, None, chat("x", n=0)),
        (CHAT, None, chat("x", n=100_000)),
        (CHAT, "invalid_type", chat("x", temperature="warm")),
        (CHAT, None, {"messages": []}),
        (CHAT, None, b'{"messages": [{"role": "user"'),
        (CHAT, "context_length_exceeded", chat("the sea " * 12_000)),
        (CHAT, "invalid_grammar", chat("x", response_format=bad_schema)),
        (CHAT, "invalid_grammar", chat("x", structured_outputs={"regex": "([a-z"})),
        (CHAT, None, chat("x", **named)),
        (CHAT, None, chat("x", top_logprobs=3)),
        (COMPLETIONS, None, {"n": 2}),
        (COMPLETIONS, None, {"prompt": "x", "n": 4, "best_of": 2}),
        (RESPONSES, None, {"input": "x", "n": 2}),
        (GENERATE, None, {"token_ids": [10**9], "sampling_params": {}}),
        (
            GENERATE,
            None,
            {"token_ids": [5, 6], "sampling_params": {}, "kv_transfer_params": {"do_remote_decode": True}},
        ),
        ("/detokenize", None, {"tokens": ["x"]}),
        (CHAT, None, chat("x", n=4, group={"stop_when": {"finished": 5}})),
        (CHAT, None, chat("x", n=4, group={"vote": True, "extract": {"regex": "(?=a)"}})),
        (CHAT, "unknown_parameter", chat("x", group={"colour": "blue"})),
    ]
    calls = [
        StatusCall(f"400 {number}", "POST", path, 400, code, body) for number, (path, code, body) in enumerate(bodies)
    ]
    calls += [
        StatusCall("wrong key", "POST", CHAT, 401, "invalid_api_key", chat("x"), {"Authorization": "Bearer wrong"}),
        StatusCall("no key", "GET", "/v1/models", 401, "invalid_api_key", headers={}),
        StatusCall("wrong model", "POST", CHAT, 404, "model_not_found", chat("x", model="nobody")),
        StatusCall("wrong path", "GET", "/v1/nothing", 404, "unknown_url"),
        StatusCall("a message without a length", "POST", MESSAGES, 400, body=chat("x")),
        StatusCall("a message with choices", "POST", MESSAGES, 400, body=chat("x", n=2, max_tokens=2)),
        StatusCall("no such group", "GET", "/v1/groups/chatcmpl-0", 404, "group_not_found"),
        StatusCall("more of no group", "POST", "/v1/groups/chatcmpl-0/more", 404, "group_not_found", {"n": 1}),
        StatusCall("no such choice", "DELETE", "/v1/groups/chatcmpl-0/choices/0", 404, "group_not_found"),
        StatusCall("no file of the page", "GET", "/page/page.py", 404, "unknown_url"),
        StatusCall("no such response", "GET", "/v1/responses/resp_1", 404),
        StatusCall("wrong method", "GET", CHAT, 405, "method_not_allowed"),
        StatusCall("no admin key", "DELETE", "/workers/decode-0", 403, "admin_key_required"),
    ]
    return calls

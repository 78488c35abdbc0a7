"""The schemas of the answers in `GET /openapi.json`, by the paths of the routes.

They have the members that clients rely on. Answers can have more: a third-party server adds its own, and members such
as `groups` or `weight_versions` are there only if the request leads to them."""

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]


def obj(**properties: Json) -> Json:
    """Returns the schema of an object that has all these properties."""
    return {"type": "object", "required": [*properties], "properties": properties}


def listed(items: Json) -> Json:
    return {"type": "array", "items": items}


def nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


ANY: Json = {}
OBJECT: Json = {"type": "object"}
TEXT, NUMBER, COUNT = {"type": "string"}, {"type": "number"}, {"type": "integer", "minimum": 0}
TRUTH = {"type": "boolean"}
TEXT_OR_NULL = {"type": ["string", "null"]}
TOKENS = listed(COUNT)
IDS_OR_NULL = nullable(TOKENS)
PARAM = {**TEXT_OR_NULL, "description": "The field that is wrong."}
ERROR = obj(error=obj(message=TEXT, type=TEXT, param=PARAM, code=TEXT_OR_NULL))
MESSAGE_ERROR = obj(type={"const": "error"}, error=obj(type=TEXT, message=TEXT), request_id=TEXT)


def _kind(name: str) -> Json:
    return {"const": name}


FINISH = {"enum": ["stop", "length", "tool_calls", "content_filter", "abort", None]}
USAGE = nullable(obj(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT))
CALL = obj(id=TEXT, type=_kind("function"), function=obj(name=TEXT, arguments=TEXT))
ANSWER_MESSAGE = obj(role=_kind("assistant"), content=TEXT_OR_NULL)
ANSWER_MESSAGE["properties"] |= {"tool_calls": listed(CALL), "reasoning_content": TEXT}


def _answer(kind: str, **choice: Json) -> Json:
    """Returns the schema of an answer of OpenAI's kind, whose choices have these members."""
    choices = listed(obj(index=COUNT, **choice, finish_reason=FINISH))
    return obj(id=TEXT, object=_kind(kind), created=COUNT, model=TEXT, choices=choices, usage=USAGE)


RESPONSE = obj(
    id=TEXT,
    object=_kind("response"),
    created_at=COUNT,
    model=TEXT,
    status={"enum": ["completed", "incomplete"]},
    output=listed(obj(type=TEXT)),
    error={"type": "null"},
    incomplete_details=nullable(obj(reason=TEXT)),
    tools=listed(obj(type=TEXT)),
    usage=obj(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
)
MESSAGE = obj(
    id=TEXT,
    type=_kind("message"),
    role=_kind("assistant"),
    model=TEXT,
    content=listed(obj(type={"enum": ["text", "thinking", "tool_use"]})),
    stop_reason=TEXT_OR_NULL,
    stop_sequence=TEXT_OR_NULL,
    usage=obj(input_tokens=COUNT, output_tokens=COUNT, cache_read_input_tokens=COUNT),
)
GENERATED = obj(
    request_id=TEXT,
    choices=listed(obj(index=COUNT, token_ids=IDS_OR_NULL, logprobs=nullable(OBJECT), finish_reason=FINISH)),
    prompt_logprobs=nullable(listed(nullable(OBJECT))),
    kv_transfer_params=nullable(OBJECT),
    usage=USAGE,
)
SGLANG = obj(text=TEXT, output_ids=TOKENS, meta_info=obj(id=TEXT, finish_reason=nullable(OBJECT), prompt_tokens=COUNT))
RENDERED = obj(request_id=TEXT, model=TEXT, token_ids=TOKENS, sampling_params=OBJECT, stream=TRUTH)
CARD = obj(id=TEXT, object=_kind("model"), created=COUNT, owned_by=TEXT, root=TEXT_OR_NULL, parent=TEXT_OR_NULL)
ANTHROPIC_CARD = obj(id=TEXT, type=_kind("model"), display_name=TEXT, created_at=TEXT)
GROUP = obj(id=TEXT, object=_kind("group"), state={"enum": ["writing", "over"]}, choices=listed(obj(index=COUNT)))
WORKER = obj(id=TEXT, state=TEXT, role=TEXT_OR_NULL, kind=TEXT_OR_NULL, address=TEXT)
CHANGED_WORKER = obj(id=TEXT, state=TEXT)
STATE, DONE = obj(status=TEXT), obj(message=TEXT)
VERSION = obj(weight_version=TEXT)
CHAT = _answer("chat.completion", message=ANSWER_MESSAGE, logprobs=nullable(OBJECT))
COMPLETION = _answer("text_completion", text=TEXT, logprobs=nullable(OBJECT))
SCORE = obj(
    index=COUNT,
    logprob=NUMBER,
    mean_logprob=NUMBER,
    is_greedy=TRUTH,
    num_tokens=COUNT,
    token_ids=TOKENS,
    token_logprobs=listed(NUMBER),
)
SCORES = obj(id=TEXT, object=_kind("score"), created=COUNT, model=TEXT, scores=listed(SCORE), usage=USAGE)
DECISION = obj(
    answers=listed(obj(type={"enum": ["predicate", "choice", "score"]}, name=TEXT_OR_NULL)),
    model=TEXT,
    usage=obj(
        input_tokens=COUNT,
        input_tokens_details=obj(cached_tokens=COUNT, cache_write_tokens=COUNT),
        output_tokens=COUNT,
        output_tokens_details=obj(reasoning_tokens=COUNT),
        total_tokens=COUNT,
    ),
)

DERENDERED_CHUNK = obj(chunk=obj(id=TEXT, object=TEXT, choices=listed(obj(index=COUNT))), stream_state=OBJECT)

FILE = obj(id=TEXT, object=_kind("file"), bytes=COUNT, created_at=COUNT, filename=TEXT, purpose=TEXT, status=TEXT)
BATCH = obj(
    id=TEXT,
    object=_kind("batch"),
    endpoint=TEXT,
    input_file_id=TEXT,
    completion_window=TEXT,
    status=TEXT,
    output_file_id=TEXT_OR_NULL,
    error_file_id=TEXT_OR_NULL,
    created_at=COUNT,
    request_counts=obj(total=COUNT, completed=COUNT, failed=COUNT),
)

ANSWERS: Mapping[str, Json] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/responses/render": RENDERED,
    "/v1/responses/input_tokens": obj(object=_kind("response.input_tokens"), input_tokens=COUNT),
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": obj(input_tokens=COUNT),
    "/v1/score": SCORES,
    "/v1/decisions": DECISION,
    "/inference/v1/generate": GENERATED,
    "/generate": {"anyOf": [SGLANG, listed(SGLANG)]},
    "/v1/chat/completions/render": RENDERED,
    "/v1/messages/render": RENDERED,
    "/v1/completions/render": listed(RENDERED),
    "/v1/chat/completions/derender": {"anyOf": [CHAT, DERENDERED_CHUNK]},
    "/v1/completions/derender": {"anyOf": [COMPLETION, DERENDERED_CHUNK]},
    "/tokenize": obj(count=COUNT, max_model_len=COUNT, tokens=TOKENS, token_strs=nullable(listed(TEXT))),
    "/detokenize": obj(prompt=TEXT),
    "/tokenizer_info": obj(tokenizer_class=TEXT_OR_NULL, chat_template=TEXT_OR_NULL, model_max_length=COUNT),
    "/v1/models": {"anyOf": [obj(object=_kind("list"), data=listed(CARD)), obj(data=listed(ANTHROPIC_CARD))]},
    "/v1/models/{model}": {"anyOf": [CARD, ANTHROPIC_CARD]},
    "/v1/groups/{id}/more": {"anyOf": [CHAT, COMPLETION, GENERATED]},
    "/v1/batches/{id}": BATCH,
    "/v1/batches/{id}/cancel": BATCH,
    "/status": obj(models=listed(TEXT), version=TEXT, workers=listed(WORKER), totals=OBJECT),
    "/version": obj(version=TEXT),
    "/load": obj(server_load=COUNT),
    **dict.fromkeys(("/ready", "/health/ready"), STATE),
    "/drain": obj(draining=TRUTH, groups_open=COUNT),
    "/workers/{id}": CHANGED_WORKER,
    "/workers/{id}/drain": CHANGED_WORKER,
    "/workers/{id}/kill": CHANGED_WORKER,
    **dict.fromkeys(("/health", "/health_generate", "/live", "/liveness", "/ping"), STATE),
    **dict.fromkeys(("/pause", "/resume", "/sleep", "/wake_up", "/wakeup"), STATE),
    **dict.fromkeys(("/pause_generation", "/continue_generation"), obj(message=TEXT, status=TEXT)),
    **dict.fromkeys(
        ("/abort_requests", "/abort_request", "/inference/v1/abort_requests"), obj(status=TEXT, aborted=COUNT)
    ),
    **dict.fromkeys(("/weight_info", "/get_weight_version"), VERSION),
    **dict.fromkeys(("/model_info", "/get_model_info"), obj(model_path=TEXT, weight_version=TEXT)),
    **dict.fromkeys(("/start_weight_update", "/finish_weight_update", "/update_weights"), DONE),
    **dict.fromkeys(("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"), DONE),
    "/weight_checker": {"anyOf": [obj(checksums=OBJECT), obj(match=TRUTH, mismatches=listed(TEXT)), STATE]},
    "/update_weight_version": obj(success=TRUTH, new_version=TEXT),
    "/update_weights_from_disk": obj(success=TRUTH, message=TEXT),
    **dict.fromkeys(("/reset_prefix_cache", "/clear_kv_blocks"), obj(success=TRUTH)),
    "/is_paused": obj(is_paused=TRUTH),
    "/is_sleeping": obj(is_sleeping=TRUTH),
    "/get_world_size": obj(world_size=COUNT),
    "/server_info": obj(vllm_config={"type": ["object", "string"]}),
    "/v1/loads": obj(loads=listed(obj(num_total_reqs=COUNT))),
}
"""The JSON answers of all methods of a path; a path without an entry is in `BY_METHOD`, or its answers are any JSON."""
BY_METHOD: Mapping[tuple[str, str], Json] = {
    ("get", "/v1/groups/{id}"): GROUP,
    ("delete", "/v1/groups/{id}"): obj(id=TEXT, object=_kind("group.deleted"), deleted=TRUTH),
    ("delete", "/v1/groups/{id}/choices/{index}"): obj(id=TEXT, object=_kind("group.choice"), ended=TRUTH),
    ("post", "/v1/files"): FILE,
    ("get", "/v1/files"): obj(object=_kind("list"), data=listed(FILE), has_more=TRUTH),
    ("get", "/v1/files/{id}"): FILE,
    ("delete", "/v1/files/{id}"): obj(id=TEXT, object=_kind("file"), deleted=TRUTH),
    ("post", "/v1/batches"): BATCH,
    ("get", "/v1/batches"): obj(object=_kind("list"), data=listed(BATCH), has_more=TRUTH),
    ("get", "/workers"): obj(workers=listed(WORKER)),
    ("post", "/workers"): CHANGED_WORKER,
}


def answer_schema(method: str, path: str) -> Json:
    """Returns the schema of a route's JSON answer, for a method in lower case."""
    return BY_METHOD.get((method, path)) or ANSWERS.get(path, ANY)

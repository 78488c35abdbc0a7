"""The requests to a fake vLLM server, in both dialects, and the checks with which vLLM refuses requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.peers.vllm_tokens import KNOWN_TOKENS

MAX_LOGPROBS = 20


class RequestRefused(Exception):
    """An error response in vLLM's form."""

    def __init__(self, status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True)
class Sampling:
    """The fields that have the same names in both dialects."""

    n: int
    seed: int | None
    greedy: bool
    max_tokens: int
    min_tokens: int
    stops: frozenset[int]
    """Tokens that end a choice and become its `stop_reason`."""
    ignore_eos: bool
    logprobs: int | None


@dataclass(frozen=True)
class VLLMRequest:
    """One request for tokens. `body` is the JSON that the client sent."""

    body: Mapping[str, object]
    scale_out: bool
    """True if it came to `/inference/v1/generate`."""
    model: str | None
    prompt: list[int]
    sampling: Sampling
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    transfer: dict[str, object] = field(default_factory=dict)

    @property
    def makes_ticket(self) -> bool:
        return self.transfer.get("do_remote_decode") is True

    @property
    def reads_ticket(self) -> bool:
        return self.transfer.get("do_remote_prefill") is True


def parse_completion(body: Mapping[str, object]) -> VLLMRequest:
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        raise RequestRefused(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    options = dict_of(body, "stream_options")
    if options and not body.get("stream"):
        raise RequestRefused(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    return VLLMRequest(
        body,
        scale_out=False,
        model=text_of(body, "model"),
        prompt=prompt,
        sampling=sampling_of(body),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        return_token_ids=bool(body.get("return_token_ids")),
        tokens_as_ids=bool(body.get("return_tokens_as_token_ids")),
        transfer=dict_of(body, "kv_transfer_params"),
    )


def parse_generate(body: Mapping[str, object]) -> VLLMRequest:
    prompt = body.get("token_ids")
    if not isinstance(prompt, list) or not prompt:
        raise RequestRefused(400, "List should have at least 1 item after validation", param="token_ids")
    return VLLMRequest(
        body,
        scale_out=True,
        model=text_of(body, "model"),
        prompt=prompt,
        sampling=sampling_of(dict_of(body, "sampling_params")),
        stream=bool(body.get("stream")),
        include_usage=bool(dict_of(body, "stream_options").get("include_usage")),
        return_token_ids=True,
        tokens_as_ids=True,
        transfer=dict_of(body, "kv_transfer_params"),
    )


def check(request: VLLMRequest, *, models: list[str], max_model_len: int) -> None:
    """Raises RequestRefused if vLLM would refuse this."""
    sampling = request.sampling
    if request.model is not None and request.model not in models:
        aliases = ", ".join(models)
        message = f"The model `{request.model}` does not exist. Valid aliases: {aliases}."
        raise RequestRefused(404, message, kind="NotFoundError", param="model")
    if sampling.greedy and sampling.n > 1:
        raise RequestRefused(400, f"n must be 1 when using greedy sampling, got {sampling.n}.")
    if len(request.prompt) >= max_model_len:
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{len(request.prompt)} input tokens, which exceeds this limit even without any output tokens."
        )
        raise RequestRefused(400, message, param=None if request.scale_out else "input_tokens")
    if sampling.max_tokens > max_model_len and not request.scale_out:
        message = f"max_tokens={sampling.max_tokens} cannot be greater than max_model_len={max_model_len}."
        raise RequestRefused(400, message, param="max_tokens")
    if sampling.logprobs is not None and sampling.logprobs > MAX_LOGPROBS:
        message = f"Requested sample logprobs of {sampling.logprobs}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise RequestRefused(400, message, param="logprobs")
    unknown = [token for token in request.prompt if not 0 <= token < KNOWN_TOKENS]
    if unknown:
        raise RequestRefused(400, f"Token id {unknown[0]} is out of vocabulary")


def sampling_of(found: Mapping[str, object]) -> Sampling:
    stops = found.get("stop_token_ids") or []
    assert isinstance(stops, list)
    return Sampling(
        n=int_of(found, "n", 1),
        seed=None if found.get("seed") in (None, -1) else int_of(found, "seed", 0),
        greedy=found.get("temperature") == 0,
        max_tokens=int_of(found, "max_tokens", 16),
        min_tokens=int_of(found, "min_tokens", 0),
        stops=frozenset(stops),
        ignore_eos=bool(found.get("ignore_eos")),
        logprobs=None if found.get("logprobs") is None else int_of(found, "logprobs", 0),
    )


def dict_of(found: Mapping[str, object], name: str) -> dict[str, object]:
    value = found.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestRefused(400, f"{name}: Input should be a valid dictionary", param=name)
    return value


def text_of(found: Mapping[str, object], name: str) -> str | None:
    value = found.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestRefused(400, f"{name}: Input should be a valid string", param=name)
    return value or None


def int_of(found: Mapping[str, object], name: str, default: int) -> int:
    value = found.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestRefused(400, f"{name}: Input should be a valid integer", param=name)
    return value

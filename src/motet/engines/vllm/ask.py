"""What a vLLM server is asked to generate, and the JSON in which either of its two routes takes it. Pure.

    GENERATE      /inference/v1/generate   made for token ids; there with `--enable-scale-out` or `--tokens-only`
    COMPLETIONS   /v1/completions          always there; it writes text too, which costs the server and is not read

A request that says nothing of temperature, top_p, top_k, min_p or a penalty gets at `/v1/completions` what the model's
`generation_config.json` says, so all of them are always sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from motet.constraint import Grammar, GrammarKind
from motet.types import SamplingParams


class Dialect(StrEnum):
    """By which route a server is asked; the value is its path."""

    GENERATE = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request to a vLLM server; its children are numbered from 0."""

    request_id: str
    """Of its own for every request: older servers refuse one that is under way already."""
    model: str
    prompt: Sequence[int]
    n: int
    """1 if greedy: vLLM refuses more."""
    seed: int | None
    """Unsigned 64 bits; child i draws with seed + i. None: vLLM draws as it likes."""
    sampling: SamplingParams
    """`max_tokens` is what may still be written. `prompt_logprobs` are only told without a stream: see
    `prompt_ask`; a stream leaves them out."""
    cache_salt: str = ""
    priority: int = 0
    """A server without priority scheduling need not know of others than 0, so that is not sent."""
    kv_params: object | None = None
    """A ticket or the wish for one, passed on as it is."""
    stream: bool = True


PREFILL: Mapping[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
"""The wish for a ticket."""

TOKEN_PREFIX = "token_id:"
"""How `/v1/completions` writes a token as text, with `return_tokens_as_token_ids`."""

LISTED_LOGPROBS = 20
"""What a server lists at most, unless it was started with another `--max-logprobs`."""

_SEEDS = 2**63 - 2**32


def signed_seed(seed: int) -> int:
    """A seed of ours (unsigned 64 bits) as one of vLLM's: signed 64 bits, where -1 is no seed.

    It counts as ours does, so child i of a group has the seed of a single request with seed + i, and neither it nor
    2^32 children meet -1 or the end of the range. Not all differ: seeds that are a multiple of 2^63 - 2^32 apart are
    one to vLLM, and a group that counts across such a multiple has other children than single requests would.
    """
    return seed % _SEEDS


def body_of(dialect: Dialect, ask: Ask) -> bytes:
    """The body of the request."""
    body: dict[str, object] = {"model": ask.model, "request_id": ask.request_id, "stream": ask.stream}
    if ask.stream:
        body["stream_options"] = {"include_usage": True}
    if ask.cache_salt:
        body["cache_salt"] = ask.cache_salt
    if ask.priority:
        body["priority"] = ask.priority
    if ask.kv_params is not None:
        body["kv_transfer_params"] = ask.kv_params
    if dialect is Dialect.GENERATE:
        drawing = _drawing(ask) | {"logprobs": _listed(ask.sampling.logprobs), "detokenize": False}
        return msgspec.json.encode(body | {"token_ids": ask.prompt, "sampling_params": drawing})
    tokens = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": ask.sampling.logprobs}
    return msgspec.json.encode(body | {"prompt": ask.prompt} | tokens | _drawing(ask))


def prefill_ask(ask: Ask) -> Ask:
    """The same prompt, one token of it, and a ticket."""
    return replace(_one_token(ask), kv_params=PREFILL, sampling=SamplingParams(max_tokens=1, temperature=0.0))


def prompt_ask(ask: Ask) -> Ask:
    """The same prompt for its log-probabilities alone, which vLLM tells only without a stream. It computes all of the
    prompt for them, whatever it has in its prefix cache."""
    logprobs = ask.sampling.prompt_logprobs
    return replace(_one_token(ask), sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=logprobs))


def _one_token(ask: Ask) -> Ask:
    return replace(ask, n=1, seed=None, kv_params=None, stream=False)


def _drawing(ask: Ask) -> dict[str, object]:
    """How tokens are drawn; both routes have the same names for it."""
    sampling = ask.sampling
    grammar = sampling.grammar
    return {
        "n": ask.n,
        "seed": None if ask.seed is None else signed_seed(ask.seed),
        "max_tokens": sampling.max_tokens,
        # A grammar wins over both: vLLM would write on behind its end, or find no token that may end it.
        "min_tokens": 0 if grammar else sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": sampling.logit_bias or None,
        "ignore_eos": sampling.ignore_eos and not grammar,
        "stop_token_ids": sampling.stop_token_ids,
        "prompt_logprobs": None if ask.stream else sampling.prompt_logprobs,
    } | ({"structured_outputs": _structured_outputs(grammar)} if grammar else {})


def _structured_outputs(grammar: Grammar) -> dict[str, object]:
    """A grammar by vLLM's names. What may be thought before it is left out: a server that was started with
    `--reasoning-parser` lets its model think first by itself."""
    match grammar.kind:
        case GrammarKind.CHOICE:
            return {"choice": msgspec.Raw(grammar.source.encode())}
        case GrammarKind.LARK:
            return {"grammar": grammar.source}
        case GrammarKind.JSON | GrammarKind.REGEX:
            return {grammar.kind.value: grammar.source}


def _listed(logprobs: int | None) -> int | None:
    """How many log-probabilities `/inference/v1/generate` must list so that the best ones are among them: it counts the
    drawn token as one of them, whatever its rank. Where that would be more than servers allow, the last is missing if
    the drawn token is none of the best."""
    return min(logprobs + 1, max(logprobs, LISTED_LOGPROBS)) if logprobs else logprobs

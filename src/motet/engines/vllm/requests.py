"""The requests to a vLLM server for a group, their order, and the JSON of each. Pure.

    fresh choices                   one request for each run of seeds s, s+1, ..., which vLLM counts by itself
        and no seed was named       one request for all
        and single ones may end     one request each: a child of a larger one cannot be ended alone
    greedy, the same written        one request, whose tokens all of them get: vLLM refuses n > 1 there
    resumed                         one request each, with the written tokens after its prompt

    with a ticket                   leader ──first token──► the others

A ticket is for one sequence. So the first fresh choice goes ahead with it, and the others follow when its first token
shows that the KV is there: they find it in the prefix cache. If all choices are resumed, a scout goes ahead: the plain
prompt, for one token, which nobody gets.

A resumed choice keeps its tokens, frequency penalties exactly and presence penalties in part (see `_carried_bias`), and
repetition penalties, which count the prompt. It does not keep its position in the random numbers: vLLM begins each
request with new ones, and with the same seed would use those again that the choice has used already. So a new seed is
derived from the number of written tokens. The answer goes on from its tokens, but may differ from the undisturbed one.

A choice with a grammar is not resumed at all: vLLM would begin the grammar anew in the middle of the answer. Another
kind of worker may go on with it.

A server takes a request by one of two routes:

    GENERATE      /inference/v1/generate   made for token ids; there with `--enable-scale-out` or `--tokens-only`
    COMPLETIONS   /v1/completions          always there; it writes text too, which costs the server and is not read

If a request leaves out temperature, top_p, top_k, min_p or a penalty, `/v1/completions` takes it from the model's
`generation_config.json`, so all of them are always sent.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b

import msgspec

from motet.engines.wire import UNREADABLE
from motet.errors import EngineError, RequestError, WorkerLeavingError
from motet.ids import RequestId
from motet.tracing.context import TraceContext
from motet.transfer.ticket import Ticket, prompt_digest
from motet.types import ChoiceStart, GenerateRequest, LogprobsMode, SamplingParams

KVParams = dict[str, object]
"""vLLM's `kv_transfer_params`, which only the KV connectors of two of its servers read. They travel unchanged in a
ticket of ours that names their maker and their prompt."""
LEASE_S = 30.0
"""The default of a NIXL connector (`kv_lease_duration`), which is not in the ticket."""
UNKNOWN_PORT = 1

MOST_BIAS = 100.0
"""vLLM cuts biases to +100 and -100."""
PREFILL: Mapping[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
"""The `kv_transfer_params` that ask for a ticket."""
TOKEN_PREFIX = "token_id:"
"""The prefix with which `/v1/completions` writes a token as text, with `return_tokens_as_token_ids`."""
LISTED_LOGPROBS = 20
"""The most log-probabilities a server lists, unless it was started with another `--max-logprobs`."""
ELSEWHERE = ("grammar", "logprobs", "logprob_token_ids", "logprobs_mode")
"""Fields of `SamplingParams` that vLLM has under other names, or that differ on the two routes."""

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)

_SEEDS = 2**63 - 2**32


class Dialect(StrEnum):
    """The route that a server is asked on; the value is its path."""

    GENERATE = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class VLLMRequest:
    """One request to a vLLM server; its children are numbered from 0."""

    request_id: str
    """Different for every request: older servers refuse one that is under way already."""
    model: str
    prompt: Sequence[int]
    n: int
    """1 if greedy: vLLM refuses more."""
    seed: int | None
    """Unsigned 64 bits; child i draws with seed + i. None: vLLM draws as it likes."""
    sampling: SamplingParams
    """`max_tokens` counts only tokens that may still be written. vLLM gives `prompt_logprobs` only without a stream
    (see `prompt_ask`); a stream leaves them out."""
    cache_salt: str = ""
    priority: int = 0
    """0 is not sent: a server without priority scheduling may not know the field."""
    kv_params: object | None = None
    """A ticket, or `PREFILL`, passed on unchanged."""
    stream: bool = True
    trace: str = ""
    traceparent: TraceContext | None = None
    session_id: str = ""
    choices: tuple[tuple[int, ...], ...] = ()
    """For each child the choices that get its tokens; a scout's child has none."""

    @property
    def indices(self) -> Iterator[int]:
        return (index for indices in self.choices for index in indices)


@dataclass(frozen=True)
class GroupRequests:
    leader: VLLMRequest | None
    """The request with the ticket; None if there is no ticket."""
    rest: tuple[VLLMRequest, ...]
    """Sent when the leader's first token has come, at once if there is no leader."""
    prompt: VLLMRequest | None = None
    """Asks for the log-probabilities of the prompt, if they are wanted."""


def plan_asks(request: GenerateRequest) -> GroupRequests:
    """Returns the requests of a group. Raises EngineError for choices that have nothing left to write,
    WorkerLeavingError for choices with which only another kind of worker can go on, and RequestError."""
    if request.sampling.grammar is not None and (
        begun := [start.index for start in request.choices if start.output_tokens]
    ):
        raise WorkerLeavingError(
            f"choice {begun[0]} follows a grammar, and its worker is gone: a vLLM server cannot "
            "go on with it in the middle of the answer"
        )
    if request.sampling.logprobs_mode is not LogprobsMode.RAW:
        why = "is for the engines of this server: the model is on a vLLM server, which has a --logprobs-mode of its own"
        message = f"Unsupported parameter: 'logprobs_mode' {why}."
        raise RequestError(message, param="logprobs_mode", code="unsupported_parameter")
    if request.keep_s:
        message = "Unsupported parameter: 'keep_s' is for the engines of this server: the model is on a vLLM server."
        raise RequestError(message, param="keep_s", code="unsupported_parameter")
    prompt = plain_ask(request) if request.sampling.prompt_logprobs is not None else None
    if request.ticket is None:
        asks = (_ask(request, str(number), starts=starts) for number, starts in enumerate(_together(request)))
        return GroupRequests(None, tuple(asks), prompt)
    leader = _leader(request, params_from(request.ticket))
    led = set(leader.indices)
    others = [start.index for start in request.choices if start.index not in led]
    return GroupRequests(leader, plan_asks(without_ticket(request, others)).rest if others else (), prompt)


def without_ticket(request: GenerateRequest, indices: Iterable[int], *, name: str = "") -> GenerateRequest:
    """Returns these choices of a group without its ticket. `name` distinguishes the requests from earlier ones."""
    kept = frozenset(indices)
    return msgspec.structs.replace(
        request,
        request_id=RequestId(f"{request.request_id}:{name}") if name else request.request_id,
        choices=tuple(start for start in request.choices if start.index in kept),
        sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=None),
        ticket=None,
    )


def plain_ask(request: GenerateRequest) -> VLLMRequest:
    """Returns a request for the prompt of a group, without its choices."""
    return _ask(request, "prompt", starts=(ChoiceStart(0, 0),))


def resumed_seed(seed: int, num_written: int) -> int:
    """Returns the seed of a choice that has written this many tokens: the first 64 bits of blake2b of both numbers
    (unsigned 64 bits, little endian). It changes with every move, so no random number is used for two tokens."""
    digest = blake2b(struct.pack("<QQ", seed, num_written), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _leader(request: GenerateRequest, params: KVParams) -> VLLMRequest:
    fresh = [start for start in request.choices if not start.output_tokens]
    if not fresh:
        scout = msgspec.structs.replace(request, sampling=ONE_TOKEN)
        return replace(_ask(scout, "leader", starts=(ChoiceStart(0, 0),), kv_params=params), choices=((),))
    return _ask(request, "leader", starts=fresh if request.sampling.greedy else fresh[:1], kv_params=params)


def _together(request: GenerateRequest) -> list[list[ChoiceStart]]:
    if request.sampling.greedy:
        alike: dict[tuple[int, ...], list[ChoiceStart]] = {}
        for start in request.choices:
            alike.setdefault(start.output_tokens, []).append(start)
        return list(alike.values())
    together: list[list[ChoiceStart]] = []
    run: list[ChoiceStart] = []
    for start in request.choices:
        if start.output_tokens or request.stops:
            together.append([start])
        elif run and (not request.seeded or signed_seed(start.seed) == signed_seed(run[-1].seed) + 1):
            run.append(start)
        else:
            run = [start]
            together.append(run)
    return together


def _ask(
    request: GenerateRequest, name: str, *, starts: Sequence[ChoiceStart], kv_params: object | None = None
) -> VLLMRequest:
    """Returns one request for all `starts`. If one of them has written, it is alone, or all are greedy and equal."""
    first, sampling, indices = starts[0], request.sampling, tuple(start.index for start in starts)
    seed = resumed_seed(first.seed, len(first.output_tokens)) if first.output_tokens else first.seed
    choices = (indices,) if sampling.greedy else tuple((index,) for index in indices)
    return VLLMRequest(
        request_id=f"{request.request_id}:{name}",
        model=request.model,
        prompt=request.prompt + first.output_tokens,
        n=len(choices),
        seed=seed if request.seeded and not sampling.greedy else None,
        sampling=_left(request, first) if first.output_tokens else sampling,
        cache_salt=request.cache_salt,
        priority=request.priority,
        kv_params=kv_params,
        trace=request.trace,
        traceparent=request.traceparent,
        session_id=request.session_id,
        choices=choices,
    )


def _left(request: GenerateRequest, start: ChoiceStart) -> SamplingParams:
    """Returns the sampling parameters for the rest of a choice."""
    sampling, num_written = request.sampling, len(start.output_tokens)
    if num_written >= sampling.max_tokens:
        raise EngineError(
            f"choice {start.index} of group {request.request_id} has written {num_written} of {sampling.max_tokens} "
            "tokens already: there is nothing to resume"
        )
    return msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - num_written,
        min_tokens=max(0, sampling.min_tokens - num_written),
        logit_bias=_carried_bias(sampling, start.output_tokens),
    )


def _carried_bias(sampling: SamplingParams, written: Sequence[int]) -> dict[int, float]:
    """Returns the penalties of written tokens as biases: for vLLM they are part of the prompt, which has no penalties.

    Exact for the frequency penalty, as long as the sum is within `MOST_BIAS`. A token that has been written and is
    written again pays the presence penalty twice from then on: vLLM counts it as new. With a repetition penalty beside
    them, which vLLM applies to logits that have their biases already, both are a little off.
    """
    bias = dict(sampling.logit_bias)
    if sampling.frequency_penalty or sampling.presence_penalty:
        for token_id, times in Counter(written).items():
            penalty = sampling.frequency_penalty * times + sampling.presence_penalty
            bias[token_id] = max(-MOST_BIAS, min(MOST_BIAS, bias.get(token_id, 0.0) - penalty))
    return bias


def signed_seed(seed: int) -> int:
    """Turns a seed of ours (unsigned 64 bits) into one of vLLM's: signed 64 bits, where -1 means no seed.

    It counts as ours does, so child i of a group has the seed of a single request with seed + i, and neither it nor
    2^32 children meet -1 or the end of the range. Seeds that are a multiple of 2^63 - 2^32 apart are equal for
    vLLM, and a group that counts across such a multiple has other children than single requests would.
    """
    return seed % _SEEDS


def body_of(dialect: Dialect, ask: VLLMRequest) -> bytes:
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
        drawing = _drawing(ask) | _listed(ask.sampling) | {"detokenize": False}
        return msgspec.json.encode(body | {"token_ids": ask.prompt, "sampling_params": drawing})
    named = ask.sampling.logprob_token_ids or None
    scores = {"logprobs": ask.sampling.logprobs, "logprob_token_ids": named}
    tokens = {"return_token_ids": True, "return_tokens_as_token_ids": True, **scores}
    return msgspec.json.encode(body | {"prompt": ask.prompt} | tokens | _drawing(ask))


def prefill_ask(ask: VLLMRequest) -> VLLMRequest:
    return replace(ask, n=1, seed=None, sampling=ONE_TOKEN, kv_params=PREFILL, stream=False)


def prompt_ask(ask: VLLMRequest) -> VLLMRequest:
    """Returns a request for the log-probabilities of the prompt, which vLLM gives only without a stream. It computes
    the whole prompt for them, whatever its prefix cache has."""
    sampling = msgspec.structs.replace(ONE_TOKEN, prompt_logprobs=ask.sampling.prompt_logprobs)
    return replace(ask, n=1, seed=None, sampling=sampling, kv_params=None, stream=False)


def _drawing(ask: VLLMRequest) -> dict[str, object]:
    """Returns the sampling fields: each of `SamplingParams` under its own name, which both routes of vLLM have too."""
    sampling = ask.sampling
    grammar = sampling.grammar
    same = {name: getattr(sampling, name) for name in SamplingParams.__struct_fields__ if name not in ELSEWHERE}
    changed = {
        "n": ask.n,
        "seed": None if ask.seed is None else signed_seed(ask.seed),
        # A grammar wins over both: vLLM would write on after its end, or find no token that may end it.
        "min_tokens": 0 if grammar else sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos and not grammar,
        "logit_bias": sampling.logit_bias or None,
        "allowed_token_ids": sampling.allowed_token_ids or None,
        "prompt_logprobs": None if ask.stream else sampling.prompt_logprobs,
    }
    # Thoughts need no field: a server that was started with `--reasoning-parser` lets its model think first.
    return same | changed | ({"structured_outputs": grammar.request_field} if grammar else {})


def _listed(sampling: SamplingParams) -> dict[str, object]:
    """Returns the log-probabilities that `/inference/v1/generate` must list to include the best ones, or those of the
    named tokens: it counts the drawn token as one of them, whatever its rank. If that were more than servers allow, the
    last of the best is missing if the drawn token is not among them. To make room, a named token is named twice. Raises
    RequestError for more of them than servers take so."""
    logprobs, named = sampling.logprobs, sampling.logprob_token_ids
    if not named:
        most = min(logprobs + 1, max(logprobs, LISTED_LOGPROBS)) if logprobs else logprobs
        return {"logprobs": most, "logprob_token_ids": None}
    if len(named) >= LISTED_LOGPROBS:
        why = f"the model is on a vLLM server, which tells of {LISTED_LOGPROBS - 1} tokens at most"
        raise RequestError(f"Invalid 'logprob_token_ids': {why}.", param="logprob_token_ids", code="invalid_value")
    return {"logprobs": len(named) + 1, "logprob_token_ids": (*named, named[0])}


def ticket_from(params: Mapping[str, object], *, engine_id: str, prompt: Sequence[int]) -> Ticket:
    """Makes a ticket of the parameters that the server with this `engine_id` made for `prompt`."""
    host, port = params.get("remote_host"), params.get("remote_port")
    request_id = params.get("remote_request_id")
    return Ticket(
        remote_engine_id=engine_id,
        remote_request_id=request_id if isinstance(request_id, str) else "",
        remote_host=host if isinstance(host, str) else "",
        remote_port=port if isinstance(port, int) and 0 < port < 2**16 else UNKNOWN_PORT,
        remote_block_ids=(),
        num_tokens=len(prompt),
        prompt_digest=prompt_digest(prompt),
        generations=(),
        lease_id=1,
        lease_slot=0,
        lease_s=LEASE_S,
        readers=1,
        foreign=msgspec.json.encode(params).decode(),
    )


def params_from(ticket: Ticket) -> KVParams:
    """Returns vLLM's parameters, unchanged. Raises EngineError for a ticket that is not vLLM's."""
    try:
        return msgspec.json.decode(ticket.foreign, type=KVParams)
    except UNREADABLE as error:
        raise EngineError(f"the ticket of {ticket.remote_engine_id} is not one of vLLM's") from error

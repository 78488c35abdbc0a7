"""The requests to a vLLM server for a group, their order, and the JSON of each. Pure.

    new choices                             one request for each run of seeds s, s+1, ..., which vLLM counts itself
        without a seed                      one request for all
        and single choices can end early    one request each: a child of a larger request cannot be ended alone
    greedy, with equal output tokens        one request whose tokens all of them get: vLLM refuses n > 1 there
    resumed                                 one request each, with the output tokens after its prompt

    with a ticket                           leader ──first token──► the others
    with log-probabilities of the prompt    prompt ──answer──► the others

A ticket is for one sequence. So the first new choice is sent with it, and the others follow when its first token shows
that the KV has arrived: they find it in the prefix cache. If all choices are resumed, a scout is sent first: the prompt
alone, for one token, which is discarded.

vLLM returns log-probabilities of a prompt only without a stream, and computes the complete prompt for them. So they are
requested first, and the other requests find the prompt in the prefix cache. If choices have one token, the first
request also generates a choice, and often there are no others.

A resumed choice keeps its tokens, its frequency penalties exactly and its presence penalties in part (see
`_carried_bias`), and its repetition penalties, which count the prompt. It does not keep its position in the sequence of
random numbers: vLLM starts each request at the first one, and with the same seed it would reuse the numbers that the
choice has already used. So a new seed is derived from the number of output tokens. The answer continues from its
tokens, but can differ from the undisturbed answer.

A choice with a grammar is not resumed: vLLM would start the grammar again in the middle of the answer. Another kind of
worker can continue it.

A server takes requests on one of two routes:

    GENERATE      /inference/v1/generate   for token ids; exists with `--enable-scale-out` or `--tokens-only`
    COMPLETIONS   /v1/completions          always exists; also generates text, which costs the server and is not read

If a request omits temperature, top_p, top_k, min_p or a repetition penalty, `/v1/completions` takes it from the model's
`generation_config.json`, so they are omitted only if the client did (`GenerateRequest.unset_fields`). GENERATE takes
neutral values then, so a gateway sends the defaults that such a server reports.
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
from motet.types import (
    ANY_ANSWER,
    BACKGROUND_PRIORITY,
    ChoiceStart,
    GenerateRequest,
    LogprobsMode,
    SamplingParams,
    starts_by_output,
)

KVParams = dict[str, object]
"""vLLM's `kv_transfer_params`, which are read only by the KV connectors of two vLLM servers. They travel unchanged in a
Motet ticket that names their maker and their prompt."""
LEASE_S = 30.0
"""Default lease of a NIXL connector (`kv_lease_duration`), which vLLM's parameters do not contain."""
UNKNOWN_PORT = 1

MAX_BIAS = 100.0
"""Maximum absolute value of a bias; vLLM clips larger ones."""
PREFILL: Mapping[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
"""`kv_transfer_params` that request a ticket."""
TOKEN_PREFIX = "token_id:"
"""Prefix of a token's id as text on `/v1/completions`, with `return_tokens_as_token_ids`."""
LISTED_LOGPROBS = 20
"""Maximum number of log-probabilities that a server lists, unless started with another `--max-logprobs`."""
TRANSLATED_FIELDS = (
    *("bad_word_ids", "bad_words", "extra_args", "grammar", "logprobs_mode"),
    *("logprobs", "logprob_token_ids", "prompt_logprob_token_ids"),
)
"""Fields of `SamplingParams` that have other names in vLLM, or differ on the two routes."""

NEUTRAL = SamplingParams(max_tokens=1)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)

_SEEDS = 2**63 - 2**32


class Dialect(StrEnum):
    """The route on which a server takes token ids; the value is its path."""

    GENERATE = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class VLLMRequest:
    """One request to a vLLM server; its children are numbered from 0."""

    request_id: str
    """Unique id: older servers refuse the id of a running request."""
    model: str
    prompt: Sequence[int]
    n: int
    """Number of children; 1 if greedy, since vLLM refuses more."""
    seed: int | None
    """Unsigned 64-bit seed; child i samples with seed + i. None if vLLM may choose."""
    sampling: SamplingParams
    """Sampling parameters. `max_tokens` counts only the remaining tokens. Streams omit `prompt_logprobs`."""
    cache_salt: str = ""
    priority: int = 0
    """Priority; 0 is not sent, since a server without priority scheduling may not know the field."""
    kv_params: object | None = None
    """vLLM's parameters of a ticket, or `PREFILL`, sent unchanged."""
    stream: bool = True
    trace: str = ""
    traceparent: TraceContext | None = None
    session_id: str = ""
    unset_fields: tuple[str, ...] = ()
    """Sampling fields that are omitted, unless `sampling` has another value than the neutral one."""
    choices: tuple[tuple[int, ...], ...] = ()
    """Choices that get the tokens of each child; a scout's child has none."""

    @property
    def indices(self) -> Iterator[int]:
        return (index for indices in self.choices for index in indices)


@dataclass(frozen=True)
class GroupRequests:
    leader: VLLMRequest | None
    """Request with the ticket; None if there is no ticket."""
    rest: tuple[VLLMRequest, ...]
    """Requests sent after the leader's first token, or else after the answer to `prompt`, or else at once."""
    prompt: VLLMRequest | None = None
    """Request for the log-probabilities of the prompt, and for a choice if choices have one token. Sent at once. None
    if the client did not request them."""


def plan_requests(request: GenerateRequest) -> GroupRequests:
    """Returns the requests of a group. Raises EngineError for choices that have no tokens left to generate,
    WorkerLeavingError for choices that only another kind of worker can continue, and RequestError."""
    resumed = [start.index for start in request.choices if start.output_tokens]
    if request.sampling.grammar is not None and resumed:
        raise WorkerLeavingError(
            f"choice {resumed[0]} follows a grammar, and its worker is gone: a vLLM server cannot continue it in the "
            "middle of the answer"
        )
    if request.sampling.logprobs_mode is not LogprobsMode.RAW:
        why = "is for Motet engines: the model is on a vLLM server, which has its own --logprobs-mode"
        message = f"Unsupported parameter: 'logprobs_mode' {why}."
        raise RequestError(message, param="logprobs_mode", code="unsupported_parameter")
    if request.sampling.prompt_logprob_token_ids or (request.sampling.logprobs and request.sampling.logprob_token_ids):
        why = "next to the most likely tokens, or for the prompt, is for Motet engines: the model is on a vLLM server"
        message = f"Unsupported parameter: 'logprob_token_ids' {why}."
        raise RequestError(message, param="logprob_token_ids", code="unsupported_parameter")
    if request.keep_s:
        message = "Unsupported parameter: 'keep_s' is for Motet engines: the model is on a vLLM server."
        raise RequestError(message, param="keep_s", code="unsupported_parameter")
    scored = request.sampling.prompt_logprobs is not None
    prompt = prompt_logprobs_request(request) if scored else None
    if request.ticket is None:
        rest = [_vllm_request(request, str(number), starts=run) for number, run in enumerate(_requests_of(request))]
        if scored and request.sampling.max_tokens == 1 and rest[0].n == 1:
            prompt = replace(rest.pop(0), request_id=f"{request.request_id}:prompt", stream=False)
        return GroupRequests(None, tuple(rest), prompt)
    leader = _leader(request, params_from(request.ticket))
    in_leader = set(leader.indices)
    others = [start.index for start in request.choices if start.index not in in_leader]
    return GroupRequests(leader, plan_requests(without_ticket(request, others)).rest if others else (), prompt)


def without_ticket(request: GenerateRequest, indices: Iterable[int], *, name: str = "") -> GenerateRequest:
    """Returns these choices of a group without its ticket. `name` distinguishes their requests from earlier ones."""
    kept = frozenset(indices)
    return msgspec.structs.replace(
        request,
        request_id=RequestId(f"{request.request_id}:{name}") if name else request.request_id,
        choices=tuple(start for start in request.choices if start.index in kept),
        sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=None),
        ticket=None,
    )


def prompt_request(request: GenerateRequest) -> VLLMRequest:
    """Returns a request for the prompt of a group, without its choices."""
    return _vllm_request(request, "prompt", starts=(ChoiceStart(0, 0),))


def resumed_seed(seed: int, num_output_tokens: int) -> int:
    """Returns the seed of a choice that resumes after this number of output tokens: the first 64 bits of blake2b of
    both numbers (unsigned 64 bits, little endian). It changes with every move, so no random number is used twice."""
    digest = blake2b(struct.pack("<QQ", seed, num_output_tokens), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _leader(request: GenerateRequest, params: KVParams) -> VLLMRequest:
    fresh = [start for start in request.choices if not start.output_tokens]
    if not fresh:
        scout = msgspec.structs.replace(request, sampling=ONE_TOKEN)
        return replace(_vllm_request(scout, "leader", starts=(ChoiceStart(0, 0),), kv_params=params), choices=((),))
    return _vllm_request(request, "leader", starts=fresh if request.sampling.greedy else fresh[:1], kv_params=params)


def _requests_of(request: GenerateRequest) -> list[list[ChoiceStart]]:
    """Returns lists of choices of a group without a ticket, one list for each vLLM request."""
    if request.sampling.greedy:
        return starts_by_output(request.choices)
    runs: list[list[ChoiceStart]] = []
    run: list[ChoiceStart] = []
    for start in request.choices:
        if start.output_tokens or request.stops:
            runs.append([start])
        elif run and (not request.seeded or signed_seed(start.seed) == signed_seed(run[-1].seed) + 1):
            run.append(start)
        else:
            run = [start]
            runs.append(run)
    return runs


def _vllm_request(
    request: GenerateRequest, name: str, *, starts: Sequence[ChoiceStart], kv_params: object | None = None
) -> VLLMRequest:
    """Returns one request for all `starts`: new choices, or one resumed choice, or greedy choices with equal tokens."""
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
        # A server without priority scheduling refuses every other priority, and batches must not need it.
        priority=0 if request.priority == BACKGROUND_PRIORITY else request.priority,
        kv_params=kv_params,
        trace=request.trace,
        traceparent=request.traceparent,
        session_id=request.session_id,
        unset_fields=request.unset_fields,
        choices=choices,
    )


def _left(request: GenerateRequest, start: ChoiceStart) -> SamplingParams:
    """Returns the sampling parameters for the rest of a choice."""
    sampling, num_output_tokens = request.sampling, len(start.output_tokens)
    if num_output_tokens >= sampling.max_tokens:
        raise EngineError(
            f"choice {start.index} of group {request.request_id} already has {num_output_tokens} of "
            f"{sampling.max_tokens} tokens: there is nothing to resume"
        )
    return msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - num_output_tokens,
        min_tokens=max(0, sampling.min_tokens - num_output_tokens),
        logit_bias=_carried_bias(sampling, start.output_tokens),
    )


def _carried_bias(sampling: SamplingParams, output_tokens: Sequence[int]) -> dict[int, float]:
    """Returns the penalties of output tokens as biases: for vLLM these tokens are part of the prompt, which has no
    penalties.

    The frequency penalty is exact as long as the sum is within `MAX_BIAS`. A token that is generated again has the
    presence penalty twice from then on, since vLLM counts it as new. With a repetition penalty, which vLLM applies to
    logits that already have their biases, both penalties are slightly off."""
    bias = dict(sampling.logit_bias)
    if sampling.frequency_penalty or sampling.presence_penalty:
        for token_id, times in Counter(output_tokens).items():
            penalty = sampling.frequency_penalty * times + sampling.presence_penalty
            bias[token_id] = max(-MAX_BIAS, min(MAX_BIAS, bias.get(token_id, 0.0) - penalty))
    return bias


def signed_seed(seed: int) -> int:
    """Converts a seed (unsigned 64 bits) to vLLM's form: signed 64 bits, where -1 means no seed.

    Consecutive seeds stay consecutive, so child i of a group has the seed of a single request with seed + i, and
    2^32 children reach neither -1 nor the end of the range. Seeds that differ by a multiple of 2^63 - 2^32 are equal in
    vLLM, and the children of a group that counts across such a multiple differ from single requests."""
    return seed % _SEEDS


def body_of(dialect: Dialect, vllm_request: VLLMRequest) -> bytes:
    body: dict[str, object] = {
        "model": vllm_request.model,
        "request_id": vllm_request.request_id,
        "stream": vllm_request.stream,
    }
    if vllm_request.stream:
        body["stream_options"] = {"include_usage": True}
    if vllm_request.cache_salt:
        body["cache_salt"] = vllm_request.cache_salt
    if vllm_request.priority:
        body["priority"] = vllm_request.priority
    if vllm_request.kv_params is not None:
        body["kv_transfer_params"] = vllm_request.kv_params
    if vllm_request.sampling.extra_args and dialect is Dialect.COMPLETIONS:
        body["vllm_xargs"] = msgspec.Raw(vllm_request.sampling.extra_args.encode())
    if dialect is Dialect.GENERATE:
        fields = _sampling_fields(vllm_request) | _listed(vllm_request.sampling) | {"detokenize": False}
        if vllm_request.sampling.extra_args:
            fields["extra_args"] = msgspec.Raw(vllm_request.sampling.extra_args.encode())
        return msgspec.json.encode(body | {"token_ids": vllm_request.prompt, "sampling_params": fields})
    named = vllm_request.sampling.logprob_token_ids or None
    scores = {"logprobs": vllm_request.sampling.logprobs, "logprob_token_ids": named}
    tokens = {"return_token_ids": True, "return_tokens_as_token_ids": True, **scores}
    return msgspec.json.encode(body | {"prompt": vllm_request.prompt} | tokens | _sampling_fields(vllm_request))


def prefill_request(vllm_request: VLLMRequest) -> VLLMRequest:
    return replace(vllm_request, n=1, seed=None, sampling=ONE_TOKEN, kv_params=PREFILL, stream=False)


def prompt_logprobs_request(request: GenerateRequest) -> VLLMRequest:
    """Returns a request for the log-probabilities of the prompt of a group, without its choices."""
    sampling = msgspec.structs.replace(ONE_TOKEN, prompt_logprobs=request.sampling.prompt_logprobs)
    return replace(prompt_request(request), seed=None, sampling=sampling, stream=False, choices=((),))


def _sampling_fields(vllm_request: VLLMRequest) -> dict[str, object]:
    """Returns the sampling fields. `SamplingParams` and both routes of vLLM have the same names."""
    sampling = vllm_request.sampling
    grammar = sampling.grammar
    unset = {name for name in vllm_request.unset_fields if getattr(sampling, name) == getattr(NEUTRAL, name)}
    omitted = {*TRANSLATED_FIELDS, *unset}
    same = {name: getattr(sampling, name) for name in SamplingParams.__struct_fields__ if name not in omitted}
    changed: dict[str, object] = {
        "n": vllm_request.n,
        "seed": None if vllm_request.seed is None else signed_seed(vllm_request.seed),
        # A grammar overrides both: vLLM would generate past its end, or find no token that is allowed to end it.
        "min_tokens": 0 if grammar else sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos and not grammar,
        "logit_bias": sampling.logit_bias or None,
        "allowed_token_ids": sampling.allowed_token_ids or None,
        "prompt_logprobs": None if vllm_request.stream else sampling.prompt_logprobs,
    }
    if sampling.bad_words:
        changed["bad_words"] = sampling.bad_words  # the server turns them into tokens itself
    # Reasoning needs no field: a server that was started with `--reasoning-parser` lets its model reason first.
    form = {"structured_outputs": grammar.request_field} if grammar and grammar.source != ANY_ANSWER else {}
    budget = None if grammar is None or grammar.thinking is None else grammar.thinking.budget
    return same | changed | form | ({} if budget is None else {"thinking_token_budget": budget.max_tokens})


def _listed(sampling: SamplingParams) -> dict[str, object]:
    """Returns the fields with which `/inference/v1/generate` lists the k best tokens, or the named tokens.

    vLLM counts the sampled token as one of the listed tokens, whatever its rank, so one more is requested. If that
    exceeds the servers' limit, the last of the best is missing when the sampled token is not among them. For the same
    reason one named token is sent twice. Raises RequestError for more named tokens than servers accept."""
    logprobs, named = sampling.logprobs, sampling.logprob_token_ids
    if not named:
        num_listed = min(logprobs + 1, max(logprobs, LISTED_LOGPROBS)) if logprobs else logprobs
        return {"logprobs": num_listed, "logprob_token_ids": None}
    if len(named) >= LISTED_LOGPROBS:
        why = f"the model is on a vLLM server, which reports at most {LISTED_LOGPROBS - 1} tokens"
        raise RequestError(f"Invalid 'logprob_token_ids': {why}.", param="logprob_token_ids", code="invalid_value")
    return {"logprobs": len(named) + 1, "logprob_token_ids": (*named, named[0])}


def ticket_from(params: Mapping[str, object], *, engine_id: str, prompt: Sequence[int]) -> Ticket:
    """Returns a ticket with the parameters that the server with this `engine_id` made for `prompt`."""
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

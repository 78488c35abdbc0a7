"""Which requests make up a group on a vLLM server, and in which order. Pure.

    fresh choices                   one request for each run of seeds s, s+1, ..., which vLLM counts by itself
        and no seed was named       one request for all
        and single ones may end     one request each: a child of a larger one cannot be ended alone
    greedy, the same written        one request whose tokens are everybody's: vLLM refuses n > 1 there
    resumed                         one request each, its prompt with what was written behind it

    with a ticket                   leader ──first token──► the others

A ticket is for one sequence. So the first fresh choice goes ahead with it, and the others follow when its first token
shows that the KV is there: they find it in the prefix cache. If all choices are resumed, a scout goes ahead: the plain
prompt and one token, which nobody gets.

What a resumed choice keeps: its tokens, of course; frequency penalties exactly and presence penalties in part (see
`_carried_bias`); repetition penalties, which count the prompt. What it does not keep is the place of its random
numbers: vLLM begins each request with new ones, and with the same seed would draw those again that the choice has used
already. So the seed is derived anew from what has been written, and the answer goes on from its tokens, but may go
elsewhere than undisturbed.

A choice with a grammar is not resumed at all: vLLM would begin the grammar anew in the middle of the answer. Another
kind of worker may take it up.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from motet.engines.vllm.ask import Ask, signed_seed
from motet.engines.vllm.tickets import params_from
from motet.errors import EngineError, WorkerLeavingError
from motet.ids import RequestId
from motet.types import ChoiceStart, GenerateRequest, SamplingParams

MOST_BIAS = 100.0
"""vLLM cuts a bias to this, up and down."""


@dataclass(frozen=True)
class PlannedAsk:
    """A request, and whose its children are."""

    ask: Ask
    choices: tuple[tuple[int, ...], ...]
    """For each child the choices that get its tokens; none for a scout."""

    @property
    def indices(self) -> Iterator[int]:
        return (index for indices in self.choices for index in indices)


@dataclass(frozen=True)
class Plan:
    """All that is to be asked for a group."""

    leader: PlannedAsk | None
    """Has the ticket; None where there is none."""
    rest: tuple[PlannedAsk, ...]
    """To be sent when the leader's first token has come, at once where there is no leader."""
    prompt: Ask | None = None
    """For the log-probabilities of the prompt, if they are wanted."""


def plan_asks(request: GenerateRequest) -> Plan:
    """Raises EngineError for choices that have nothing left to write, and WorkerLeavingError for those that another
    kind of worker may take up, but no vLLM server."""
    if request.sampling.grammar is not None and (begun := [start.index for start in request.choices if start.written]):
        raise WorkerLeavingError(
            f"choice {begun[0]} follows a grammar, and was begun by a worker that is gone: a vLLM server cannot take "
            "it up in mid-answer"
        )
    prompt = plain_ask(request) if request.sampling.prompt_logprobs is not None else None
    if request.ticket is None:
        return Plan(None, tuple(_asks(request)), prompt)
    leader = _leader(request)
    led = set(leader.indices)
    others = [start.index for start in request.choices if start.index not in led]
    return Plan(leader, plan_asks(without_ticket(request, others)).rest if others else (), prompt)


def without_ticket(request: GenerateRequest, indices: Iterable[int], *, name: str = "") -> GenerateRequest:
    """These choices of a group, to be computed from the prompt on. `name`: told from what was asked before by it."""
    kept = frozenset(indices)
    return msgspec.structs.replace(
        request,
        request_id=RequestId(f"{request.request_id}:{name}") if name else request.request_id,
        choices=tuple(start for start in request.choices if start.index in kept),
        sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=None),
        ticket=None,
    )


def plain_ask(request: GenerateRequest) -> Ask:
    """The prompt of a group, for what is asked of it beside its choices."""
    return _ask(request, "prompt", (ChoiceStart(0, 0),))


def resumed_seed(seed: int, num_written: int) -> int:
    """For a choice that has written so much: blake2b of both numbers (unsigned 64 bits, little endian), its first 64
    bits. Another one after every move, so no random number is used for two tokens."""
    digest = blake2b(struct.pack("<QQ", seed, num_written), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _leader(request: GenerateRequest) -> PlannedAsk:
    assert request.ticket is not None  # what it is called for
    params = params_from(request.ticket)
    fresh = [start for start in request.choices if not start.written]
    if not fresh:
        scouting = SamplingParams(max_tokens=1, temperature=0.0)
        scout = msgspec.structs.replace(request, sampling=scouting, choices=(ChoiceStart(0, 0),))
        return PlannedAsk(_ask(scout, "leader", scout.choices, kv_params=params), ((),))
    leading = fresh if request.sampling.greedy else fresh[:1]
    return PlannedAsk(_ask(request, "leader", leading[:1], kv_params=params), _children(request, leading))


def _asks(request: GenerateRequest) -> Iterator[PlannedAsk]:
    for number, starts in enumerate(_together(request)):
        yield PlannedAsk(_ask(request, str(number), starts), _children(request, starts))


def _children(request: GenerateRequest, starts: Sequence[ChoiceStart]) -> tuple[tuple[int, ...], ...]:
    if request.sampling.greedy:
        return (tuple(start.index for start in starts),)
    return tuple((start.index,) for start in starts)


def _together(request: GenerateRequest) -> list[list[ChoiceStart]]:
    """The choices of each request."""
    if request.sampling.greedy:
        alike: dict[tuple[int, ...], list[ChoiceStart]] = {}
        for start in request.choices:
            alike.setdefault(start.written, []).append(start)
        return list(alike.values())
    together: list[list[ChoiceStart]] = []
    run: list[ChoiceStart] = []
    for start in request.choices:
        if start.written or request.stops:
            together.append([start])
        elif run and (not request.seeded or signed_seed(start.seed) == signed_seed(run[-1].seed) + 1):
            run.append(start)
        else:
            run = [start]
            together.append(run)
    return together


def _ask(request: GenerateRequest, name: str, starts: Sequence[ChoiceStart], *, kv_params: object | None = None) -> Ask:
    """`starts`: if one of them has written, it is alone, or all have written the same and are greedy."""
    first, sampling = starts[0], request.sampling
    return Ask(
        request_id=f"{request.request_id}:{name}",
        model=request.model,
        prompt=request.prompt + first.written,
        n=1 if sampling.greedy else len(starts),
        seed=_seed(first) if request.seeded and not sampling.greedy else None,
        sampling=_left(request, first) if first.written else sampling,
        cache_salt=request.cache_salt,
        priority=request.priority,
        kv_params=kv_params,
    )


def _seed(start: ChoiceStart) -> int:
    return resumed_seed(start.seed, len(start.written)) if start.written else start.seed


def _left(request: GenerateRequest, start: ChoiceStart) -> SamplingParams:
    """What may still be written by a resumed choice, and how."""
    sampling, num_written = request.sampling, len(start.written)
    if num_written >= sampling.max_tokens:
        raise EngineError(
            f"choice {start.index} of group {request.request_id} has written {num_written} of {sampling.max_tokens} "
            "tokens already: there is nothing to resume"
        )
    return msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - num_written,
        min_tokens=max(0, sampling.min_tokens - num_written),
        logit_bias=_carried_bias(sampling, start.written),
    )


def _carried_bias(sampling: SamplingParams, written: Sequence[int]) -> dict[int, float]:
    """The penalties of written tokens as biases: to vLLM they are part of the prompt, which has no such penalties.

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

"""When decode computes a prompt itself although there is prefill: where that is quicker, or where it must. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from motet.errors import EngineClosedError, EngineDiedError, MotetError, OverloadedError
from motet.routing.load import Load


class BypassReason(StrEnum):
    """Why a group was not prefilled by a prefill worker; a label of the metric."""

    ONE_TOKEN = "one-token"
    """Prefill computes all but the last token, which is nothing."""
    SHORT = "short"
    """Little is left to compute beside what decode has cached."""
    PROMPT_LOGPROBS = "prompt-logprobs"
    """Decode has to run every prompt token for its logits."""
    PREFILL_BUSY = "prefill-busy"
    """Waiting for prefill would have taken longer, or it refused to take more."""
    PREFILL_DOWN = "prefill-down"
    """No prefill worker could be reached, or none whose KV a decode worker that is up could fetch."""
    PREFILL_FAILED = "prefill-failed"
    PREFILL_LATE = "prefill-late"
    """It did not answer in time."""


@dataclass(frozen=True)
class BypassRules:
    """When it pays."""

    bypass_tokens: int = 128
    """Decode computes fewer prompt tokens than these by itself. 0: it computes nothing that prefill could, whatever the
    length and whoever waits."""
    prefill_timeout_s: float = 120.0
    prefill_may_come: bool = False
    """Without any prefill worker it is counted all the same what one would have got: where it is missed, one may be
    started."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a group and of both sides before it is sent anywhere."""

    prompt_tokens: int
    prompt_logprobs: bool
    prefill: Load | None
    """None: no prefill worker is up whose KV decode could fetch."""
    decode: Load


def bypass_reason(facts: Facts, rules: BypassRules) -> BypassReason | None:
    """None: to prefill with it."""
    if facts.prompt_tokens < 2:
        return BypassReason.ONE_TOKEN
    if facts.prompt_logprobs:
        return BypassReason.PROMPT_LOGPROBS
    if facts.decode.own_tokens < rules.bypass_tokens:
        return BypassReason.SHORT
    if facts.prefill is None:
        return BypassReason.PREFILL_DOWN
    if rules.bypass_tokens == 0:
        return None
    return BypassReason.PREFILL_BUSY if waiting_takes_longer(facts.prefill, facts.decode) else None


def waiting_takes_longer(prefill: Load, decode: Load) -> bool:
    """Whether prefill has a queue, and decode would be through with the prompt before prefill is:

        (prompt tokens waiting on prefill + tokens of this prompt not cached there) / tokens per second of prefill
            > the same of decode

    as measured (`load.WorkerLoad`), of the worker that each side would choose. The transfer is left out: it takes
    milliseconds. A decode worker that has not computed a prompt yet is taken to be as fast as prefill; once it has, its
    own figure counts. Prefill that has not been measured yet is never too busy.
    """
    if not prefill.waiting_tokens or prefill.tokens_per_s is None:
        return False
    decode_speed = prefill.tokens_per_s if decode.tokens_per_s is None else decode.tokens_per_s
    return prefill.seconds(prefill.tokens_per_s) > decode.seconds(decode_speed)


def reason_of(error: MotetError) -> BypassReason:
    """Of a prefill that was asked for and failed."""
    match error:
        case OverloadedError():
            return BypassReason.PREFILL_BUSY
        case EngineDiedError() | EngineClosedError():
            return BypassReason.PREFILL_DOWN
        case _:
            return BypassReason.PREFILL_FAILED

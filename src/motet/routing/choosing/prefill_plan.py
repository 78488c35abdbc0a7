"""Decides if a group's prompt is prefilled first, and over how many decode workers the group is split. Pure.

bypass_reason   why a decode worker computes the prompt itself: that is faster, or it is necessary
plan_parts      the number of choices that each of several decode workers gets

    time(k) = fetch(k) + steps x time of a step with the choices of the fullest of the k workers

Splitting shortens the steps, because each worker generates fewer choices, and costs a fetch of the prompt for each
part: a pull if there is a ticket, otherwise the prompt is computed again. The k least loaded workers are filled until
they have the same number of choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from motet.errors import EngineClosedError, EngineDiedError, MotetError, NoWorkerError, OverloadedError
from motet.routing.choosing.cost import CHOICE_MS, PROMPT_TOKEN_MS, PULL_TOKEN_MS
from motet.routing.workers.worker_load import PromptBacklog

PART_MS = 2.0
"""Milliseconds that a part costs in addition to its fetch: one more submission and stream."""
STEPS = 256
"""Assumed number of steps of an answer, whose length is not known. A lower `max_tokens` counts instead."""


class BypassReason(StrEnum):
    """The reason why a group was not prefilled by a prefill worker. A label of the metric."""

    ONE_TOKEN = "one-token"
    """The prompt has one token: prefill, which computes all tokens except the last, has nothing to do."""
    SHORT = "short"
    """Decode has most of the prompt cached, or the prompt is short."""
    PROMPT_LOGPROBS = "prompt-logprobs"
    """Decode must compute every prompt token, for the logits."""
    PREFILL_BUSY = "prefill-busy"
    """Waiting for prefill would have taken longer, or every prefill worker refused the prompt."""
    PREFILL_DOWN = "prefill-down"
    """No prefill worker is available whose KV an available decode worker could fetch."""
    PREFILL_FAILED = "prefill-failed"
    PREFILL_LATE = "prefill-late"


def bypass_reason(
    bypass_tokens: int,
    *,
    prompt_tokens: int,
    prompt_logprobs: bool,
    prefill: PromptBacklog | None,
    decode: PromptBacklog,
) -> BypassReason | None:
    """Returns None if a prefill worker should compute the prompt.

    `bypass_tokens`: decode computes prompts with fewer new tokens itself. With 0, prefill computes every prompt that it
    can, whatever its length and its queue. `prefill`, `decode`: backlogs of the workers that would get the group;
    `prefill` is None if no worker is available whose KV decode could fetch."""
    if prompt_tokens < 2:
        return BypassReason.ONE_TOKEN
    if prompt_logprobs:
        return BypassReason.PROMPT_LOGPROBS
    if decode.own_tokens < bypass_tokens:
        return BypassReason.SHORT
    if prefill is None:
        return BypassReason.PREFILL_DOWN
    if bypass_tokens == 0:
        return None
    return BypassReason.PREFILL_BUSY if waiting_takes_longer(prefill, decode) else None


def waiting_takes_longer(prefill: PromptBacklog, decode: PromptBacklog) -> bool:
    """Returns True if prefill has a queue, and decode would finish the prompt before prefill does:

        (prompt tokens waiting on prefill + tokens of this prompt not cached there) / tokens per second of prefill
            > the same figure of decode

    as measured (`PromptLoad`) for the worker that each side would choose. The transfer is left out, because it takes
    milliseconds. A decode worker that has not computed a prompt yet counts as fast as prefill. Prefill that has not
    been measured yet is never too busy."""
    if not prefill.waiting_tokens or prefill.tokens_per_s is None:
        return False
    decode_speed = prefill.tokens_per_s if decode.tokens_per_s is None else decode.tokens_per_s
    return prefill.seconds(prefill.tokens_per_s) > decode.seconds(decode_speed)


def reason_of(error: MotetError) -> BypassReason:
    """Returns the reason why decode computes a prompt whose prefill failed with this error."""
    match error:
        case OverloadedError():
            return BypassReason.PREFILL_BUSY
        case EngineDiedError() | NoWorkerError() | EngineClosedError():
            return BypassReason.PREFILL_DOWN
        case _:
            return BypassReason.PREFILL_FAILED


@dataclass(frozen=True)
class SplitFacts:
    """The facts about a group that could be split."""

    choices: int
    prompt_tokens: int
    max_tokens: int
    ticket: bool
    """True if each part fetches the prompt. Otherwise each part computes it."""


def plan_parts(group: SplitFacts, open_choices: Sequence[int], *, spread_choices: int) -> list[int]:
    """Returns the number of choices of each part; with one part the group is not split. `open_choices`: per worker.

    A group of up to `spread_choices` choices is not split, and no part has fewer than half of `spread_choices`."""
    if not spread_choices or group.choices <= spread_choices:
        return [group.choices]
    min_choices = max(1, spread_choices // 2)
    max_parts = min(len(open_choices), group.choices // min_choices)
    levels = sorted(open_choices)
    plans = [filled(group.choices, levels[:parts]) for parts in range(1, max_parts + 1)]
    plans = [plan for plan in plans if min(plan) >= min_choices]
    return min(plans, key=lambda plan: (time_ms(group, plan, levels=levels), len(plan)), default=[group.choices])


def time_ms(group: SplitFacts, plan: Sequence[int], *, levels: Sequence[int]) -> float:
    """Returns the time that depends on the split. `levels`: open choices of the workers, ascending."""
    fetch_ms = group.prompt_tokens * (PULL_TOKEN_MS if group.ticket else PROMPT_TOKEN_MS)
    fullest = max(level + choices for level, choices in zip(levels, plan, strict=False))
    return len(plan) * (fetch_ms + PART_MS) + min(group.max_tokens, STEPS) * fullest * CHOICE_MS


def filled(choices: int, levels: Sequence[int]) -> list[int]:
    """Returns the number of choices per worker: they fill the lowest of the ascending `levels` until all are equal."""
    plan = [0] * len(levels)
    left = choices
    for width in range(1, len(levels) + 1):
        step = (levels[width] - levels[width - 1]) * width if width < len(levels) else left
        added = min(left, step)
        for worker in range(width):
            plan[worker] += added // width + (worker < added % width)
        left -= added
    return plan

"""The course of one request to a text upstream through this one: its figures, and the log line when it ends.

The same figures as of a group of tokens, as far as the server tells: prompt and tokens are known at the end or never.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from motet.api.admission import Place
from motet.api.service import Service
from motet.engines.upstream.base import TextRequest, TextStep, TextUsage
from motet.metrics.record import GroupRecord
from motet.types import FinishReason

log = logging.getLogger("motet.api")

_REASONS = {reason.value: reason for reason in FinishReason}


@dataclass(frozen=True)
class _Shown:
    index: int
    finish: FinishReason | None


class UpstreamCourse:
    """Begins when the request has its places; `end` must follow."""

    def __init__(self, service: Service, request: TextRequest, places: Sequence[Place], *, name: str) -> None:
        """`name`: the answer's id."""
        self._clock = service.clock
        self._request = request
        self._places = places
        self._name = name
        self._ended = False
        self._record = GroupRecord(num_choices=request.num_choices, started_s=self._clock())
        self._metrics = service.metrics.of(request.model)
        self._metrics.group_opened(self._record, prompt_tokens=None, max_tokens=None)

    def step(self, steps: Sequence[TextStep]) -> None:
        """Notes what came in one go."""
        shown = [_Shown(piece.index, _reason(piece.finish)) for step in steps for piece in step.pieces]
        since = self._record.step(shown, self._clock())
        if since is not None:
            self._metrics.steps.add(since)
            return
        for place in self._places:
            place.started()

    def end(self, *, status: int, usage: TextUsage | None, worker: str) -> None:
        """Leaves the places; counts and logs the request, once."""
        if self._ended:
            return
        self._ended = True
        for place in self._places:
            place.leave()
        now, record, request = self._clock(), self._record, self._request
        self._metrics.group_ended(record, status=status, tokens={}, now_s=now)
        fields = {
            "request_id": request.trace,
            "group": self._name,
            "status": status,
            "model": request.model,
            "worker": worker,
            "n": record.num_choices,
            "prompt_tokens": usage.prompt_tokens if usage else None,
            "cached_tokens": usage.cached_tokens if usage else None,
            "completion_tokens": usage.completion_tokens if usage else None,
            "finished": len(record.finished_s),
            "first_token_s": _rounded(record.first_token_s),
            "last_choice_first_token_s": _rounded(record.last_choice_first_token_s),
            "total_s": _rounded(now - record.started_s),
        }
        log.info("group ended", extra={"fields": fields})


def _reason(told: str | None) -> FinishReason | None:
    """Servers have words of their own; those that are none of OpenAI's count as an ordinary end."""
    return None if told is None else _REASONS.get(told, FinishReason.STOP)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)

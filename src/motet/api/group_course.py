"""The course of one group through this server: its place at the door, its figures, and the log line when it ends."""

import logging
from collections.abc import Mapping, Sequence

from motet.api.admission import Place
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.metrics.record import GroupRecord, Shown
from motet.types import GenerateRequest

log = logging.getLogger("motet.api")


class GroupCourse:
    """Begins when the group has a place; `end` must follow."""

    def __init__(self, service: Service, served: ServedModel, request: GenerateRequest, place: Place) -> None:
        self.ended = False
        self._clock = service.clock
        self._request = request
        self._place = place
        self._record = GroupRecord(num_choices=len(request.choices), started_s=self._clock())
        self._metrics = service.metrics.of(served.name)
        self._metrics.group_opened(
            self._record, prompt_tokens=len(request.prompt), max_tokens=request.sampling.max_tokens
        )

    def step(self, choices: Sequence[Shown]) -> None:
        """Notes what one step brought."""
        since = self._record.step(choices, self._clock())
        if since is None:
            self._place.started()
        else:
            self._metrics.steps.add(since)

    def end(self, *, status: int, tokens: Mapping[int, int], cached_tokens: int) -> None:
        """Leaves the place; counts and logs the group, once. `tokens`: how many each choice has written."""
        if self.ended:
            return
        self.ended = True
        self._place.leave()
        now, record, request = self._clock(), self._record, self._request
        self._metrics.group_ended(record, status=status, tokens=tokens, now_s=now)
        fields = {
            "request_id": request.trace,
            "group": request.request_id,
            "status": status,
            "n": record.num_choices,
            "prompt_tokens": len(request.prompt),
            "cached_tokens": cached_tokens,
            "completion_tokens": sum(tokens.values()),
            "finished": len(record.finished_s),
            "first_token_s": _rounded(record.first_token_s),
            "last_choice_first_token_s": _rounded(record.last_choice_first_token_s),
            "total_s": _rounded(now - record.started_s),
        }
        log.info("group ended", extra={"fields": fields})


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)

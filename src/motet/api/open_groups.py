"""The groups of one request while they run: opened all or none, read as one stream, closed all together.

With one prompt the stream is the group's own. With several, a task a group puts its steps into a queue, and whatever
lies there when the reader comes goes out in one piece. The queue has room for a step and the end of each group: a slow
reader holds the groups' streams back rather than filling memory.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass

from anyio.abc import TaskGroup

from motet.api.admission import Place
from motet.api.plan import Plan
from motet.api.service import Service
from motet.metrics.record import GroupRecord
from motet.text.group import GroupEvents, TextGroup
from motet.text.usage import Usage
from motet.types import GenerateRequest

log = logging.getLogger("motet.api")


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the engine showed of one group."""

    group: int
    """Number of the prompt inside the request."""
    events: GroupEvents


class OpenGroup:
    """One group, its place at the door and what is known of its course."""

    def __init__(self, service: Service, request: GenerateRequest, group: TextGroup, place: Place) -> None:
        self.text = group
        self._service = service
        self._request = request
        self._place = place
        self._ended = False
        self.record = GroupRecord(num_choices=len(request.choices), started_s=service.clock())
        service.metrics.group_opened(
            self.record, prompt_tokens=len(request.prompt), max_tokens=request.sampling.max_tokens
        )

    async def read(self) -> GroupEvents | None:
        """What the next step showed; None after the last."""
        try:
            events = await anext(self.text)
        except StopAsyncIteration:
            return None
        self._place.started()
        since = self.record.step(((event.index, event.finish) for event in events.events), self._service.clock())
        if since is not None:
            self._service.metrics.step(since)
        return events

    async def close(self, *, status: int, trace: str) -> None:
        """Frees the group; counts and logs it, once."""
        if self._ended:
            return
        self._ended = True
        self._place.leave()
        self._account(status, trace)
        await self.text.aclose()

    def _account(self, status: int, trace: str) -> None:
        now, record = self._service.clock(), self.record
        counts = {choice.index: self.text.usage_of(choice.index).completion_tokens for choice in self._request.choices}
        self._service.metrics.group_ended(record, status=status, tokens=counts, now_s=now)
        usage = self.text.usage
        fields = {
            "request_id": trace,
            "group": self._request.request_id,
            "status": status,
            "n": record.num_choices,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "finished": len(record.finished_s),
            "first_token_s": _rounded(record.first_token_s),
            "last_choice_first_token_s": _rounded(record.last_choice_first_token_s),
            "total_s": _rounded(now - record.started_s),
        }
        log.info("group ended", extra={"fields": fields})


class OpenGroups:
    """The groups of one request. `aclose` must follow `open`, also when `open` failed half way."""

    def __init__(self, service: Service, plan: Plan) -> None:
        self._service = service
        self._plan = plan
        self._places: list[Place] = []
        self._groups: list[OpenGroup] = []

    def open(self) -> None:
        """Admits and submits all groups; raises `OverloadedError` and the like before the engine has seen any."""
        service, plan = self._service, self._plan
        self._places = service.admission.admit(len(plan.groups))
        for request, place in zip(plan.groups, self._places, strict=True):
            text = TextGroup(service.engine, request, service.tokenizer, plan.rules)
            self._groups.append(OpenGroup(service, request, text, place))

    @property
    def usage(self) -> Usage:
        """Of the whole request, up to now."""
        first, *others = (group.text.usage for group in self._groups)
        return sum(others, start=first)

    def steps(self, tasks: TaskGroup) -> "OneGroup | ManyGroups":
        """To be read once; `tasks` is where readers of several groups run."""
        return OneGroup(self._groups[0]) if len(self._groups) == 1 else ManyGroups(self._groups, tasks)

    async def aclose(self, *, status: int) -> None:
        """Ends what still runs. `status`: how the request went, for the log and the metrics."""
        async with AsyncExitStack() as closing:  # one that fails does not keep the others open
            for place in self._places:
                closing.callback(place.leave)
            for group in reversed(self._groups):
                closing.push_async_callback(group.close, status=status, trace=self._plan.trace)


class OneGroup:
    def __init__(self, group: OpenGroup) -> None:
        self._group = group

    async def read(self) -> list[Step] | None:
        """What is there to show, at least one step; None after the end."""
        events = await self._group.read()
        return None if events is None else [Step(0, events)]


class ManyGroups:
    """The steps of several groups as they come. The first error of any ends the stream."""

    def __init__(self, groups: list[OpenGroup], tasks: TaskGroup) -> None:
        self._queue: asyncio.Queue[Step | Exception | None] = asyncio.Queue(maxsize=2 * len(groups))
        self._unfinished = len(groups)
        for number, group in enumerate(groups):
            tasks.start_soon(self._pump, number, group)

    async def read(self) -> list[Step] | None:
        """What is there to show, at least one step; None after the end."""
        steps: list[Step] = []
        while self._unfinished and not (steps and self._queue.empty()):
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                self._unfinished -= 1
            else:
                steps.append(item)
        return steps or None

    async def _pump(self, number: int, group: OpenGroup) -> None:
        try:
            while (events := await group.read()) is not None:
                await self._queue.put(Step(number, events))
            await self._queue.put(None)
        except Exception as error:  # handed to the reader, who raises it
            await self._queue.put(error)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)

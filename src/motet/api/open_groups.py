"""The groups of one request while they run: opened all or none, read as one stream, closed all together.

With one prompt the stream is the group's own, a step at a time. With several, a task a group puts its steps into a
queue, and whatever lies there when the reader comes goes out in one piece. The queue has room for a step and the end of
each group: a slow reader holds the groups' streams back rather than filling memory.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Protocol

import msgspec
from anyio.abc import TaskGroup

from motet.api.admission import Place
from motet.api.answer import SENT, Answer, Writer
from motet.api.group_course import GroupCourse
from motet.api.key_limits import Share
from motet.api.plan import Plan
from motet.api.prefill_group import PrefillGroup
from motet.api.service import Service
from motet.text.group import GroupEvents, TextGroup
from motet.text.usage import Usage
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest


class Step(msgspec.Struct, frozen=True, gc=False):
    """What one step of the engine showed of one group."""

    group: int
    """Number of the prompt inside the request."""
    events: GroupEvents
    ticket: Ticket | None = None
    """If it came to one."""


GroupsAnswer = Answer[Step, Usage]
GroupsWriter = Writer[Step, Usage]


class Source(Protocol):
    """Where the events of a group come from."""

    @property
    def usage(self) -> Usage: ...

    @property
    def worker(self) -> str: ...

    def usage_of(self, index: int) -> Usage: ...

    async def __anext__(self) -> GroupEvents: ...

    async def aclose(self) -> None: ...


class OpenGroup:
    """One group, its place at the door and what is known of its course."""

    def __init__(
        self,
        request: GenerateRequest,
        source: Source,
        course: GroupCourse,
        *,
        number: int,
        prefill: PrefillGroup | None,
    ) -> None:
        """`number`: of the prompt inside the request; `prefill`: the source, if that is all the group is for."""
        self._source = source
        self._prefill = prefill
        self._request = request
        self._number = number
        self._course = course

    async def read(self) -> tuple[Step] | None:
        """The next step; None after the last."""
        try:
            events = await self._source.__anext__()
        except StopAsyncIteration:
            return None
        self._course.step(events.events)
        return (Step(self._number, events, self._prefill.ticket if self._prefill else None),)

    @property
    def usage(self) -> Usage:
        return self._source.usage

    @property
    def worker(self) -> str:
        """Who writes it, if it has been told."""
        return self._source.worker

    async def close(self, *, status: int) -> None:
        """Frees the group; counts and logs it, once."""
        if not self._course.ended:
            counts = {
                choice.index: self._source.usage_of(choice.index).completion_tokens for choice in self._request.choices
            }
            self._course.end(status=status, tokens=counts, cached_tokens=self.usage.cached_tokens)
            await self._source.aclose()


class OpenGroups:
    """The groups of one request. `aclose` must follow, also when `open` failed half way or never came."""

    def __init__(self, service: Service, plan: Plan) -> None:
        self._service = service
        self._plan = plan
        self._share: Share | None = None
        self._places: list[Place] = []
        self._groups: list[OpenGroup] = []
        self._prefill: PrefillGroup | None = None

    def open(self) -> None:
        """Admits and submits all groups; raises `OverloadedError` and the like before the engine has seen any."""
        service, plan = self._service, self._plan
        if plan.client is not None:
            self._share = service.key_limits.enter(plan.client, plan.num_choices)
        self._places = service.admission.admit(len(plan.groups))
        for number, (request, place) in enumerate(zip(plan.groups, self._places, strict=True)):
            source = self._submit(request)
            course = GroupCourse(service, plan.served, request, place)
            self._groups.append(OpenGroup(request, source, course, number=number, prefill=self._prefill))

    def usage(self) -> Usage:
        """Of the whole request, up to now."""
        first, *others = (group.usage for group in self._groups)
        return sum(others, start=first)

    @property
    def workers(self) -> tuple[str, ...]:
        """Who writes the groups, as far as is known by now, each once."""
        told = tuple(dict.fromkeys(group.worker for group in self._groups if group.worker))
        return told or tuple(filter(None, (self._service.only_worker,)))

    def steps(self, tasks: TaskGroup) -> "OpenGroup | ManyGroups":
        """To be read once; `tasks` is where readers of several groups run."""
        return ManyGroups(self._groups, tasks) if len(self._groups) > 1 else self._groups[0]

    async def aclose(self, *, status: int) -> None:
        """Ends what still runs. `status`: how the request went, for the log and the metrics."""
        async with AsyncExitStack() as closing:  # one that fails does not keep the others open
            if self._share is not None:
                closing.callback(self._share.leave)
            for place in self._places:
                closing.callback(place.leave)
            for group in reversed(self._groups):
                closing.push_async_callback(group.close, status=status)
            for ticket in self._unused_tickets(status):
                closing.push_async_callback(self._plan.served.engine.release, ticket)

    def _submit(self, request: GenerateRequest) -> Source:
        plan, served = self._plan, self._plan.served
        if plan.order is None:
            return TextGroup(served.engine, request, served.tokenizer, plan.rules)
        self._prefill = PrefillGroup(served.engine, request, readers=plan.order.readers)
        return self._prefill

    def _unused_tickets(self, status: int) -> Iterator[Ticket]:
        """One that the client brought and the engine never got, one that was made and the client never got."""
        for request in self._plan.groups[len(self._groups) :]:
            if request.ticket is not None:
                yield request.ticket
        if self._prefill is not None and self._prefill.ticket is not None and status != SENT:
            yield self._prefill.ticket


class ManyGroups:
    """The steps of several groups as they come. The first error of any ends the stream."""

    def __init__(self, groups: list[OpenGroup], tasks: TaskGroup) -> None:
        self._queue: asyncio.Queue[Step | Exception | None] = asyncio.Queue(maxsize=2 * len(groups))
        self._unfinished = len(groups)
        for group in groups:
            tasks.start_soon(self._pump, group)

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

    async def _pump(self, group: OpenGroup) -> None:
        try:
            while (steps := await group.read()) is not None:
                for step in steps:
                    await self._queue.put(step)
            await self._queue.put(None)
        except Exception as error:  # handed to the reader, who raises it
            await self._queue.put(error)

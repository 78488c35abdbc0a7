"""One request to text upstreams while it runs: let in, asked for, read, closed. What `Answer` runs for a text model."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from anyio.abc import TaskGroup

from motet.api.admission import Place
from motet.api.key_limits import Share
from motet.api.service import Service
from motet.api.upstream_course import UpstreamCourse
from motet.engines.upstream.base import TextGroup, TextRequest, TextSource, TextStep, TextUsage


class UpstreamGroups:
    """All prompts of the request are one group here: the server may be given them in one request."""

    def __init__(self, service: Service, source: TextSource, request: TextRequest, *, name: str, client: str) -> None:
        """`name`: the answer's id; `client`: whose limits it counts against."""
        self._service = service
        self._source = source
        self._request = request
        self._name = name
        self._client = client
        self._share: Share | None = None
        self._places: list[Place] = []
        self._group: TextGroup | None = None
        self._course: UpstreamCourse | None = None

    @property
    def workers(self) -> Sequence[str]:
        return (self._group.worker,) if self._group is not None and self._group.worker else ()

    def open(self) -> None:
        request, service = self._request, self._service
        self._share = service.key_limits.enter(self._client, request.num_choices)
        self._places = service.admission.admit(request.num_prompts)
        self._course = UpstreamCourse(service, request, self._places, name=self._name)
        self._group = self._source.generate(request)

    def usage(self) -> TextUsage | None:
        return None if self._group is None else self._group.usage

    def steps(self, tasks: TaskGroup) -> "UpstreamGroups":
        """The group has tasks of its own."""
        return self

    async def read(self) -> Sequence[TextStep] | None:
        assert self._group is not None and self._course is not None  # it has been opened
        steps = await self._group.read()
        if not steps:
            return None
        self._course.step(steps)
        return steps

    async def aclose(self, *, status: int) -> None:
        async with AsyncExitStack() as closing:  # one that fails does not keep the others open
            if self._share is not None:
                closing.callback(self._share.leave)
            for place in self._places:
                closing.callback(place.leave)
            if self._group is not None:
                closing.push_async_callback(self._group.aclose)
            if self._course is not None:
                self._course.end(status=status, usage=self.usage(), worker=", ".join(self.workers))

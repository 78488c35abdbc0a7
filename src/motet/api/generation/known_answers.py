"""The answers to a checked request for tokens: the first answer, and later answers with more choices of its prompt.

Each prompt is a group. The client can find the group by its id while it generates and while its trunk is kept
(`known_groups`). More choices are another group for the engine, which shares the trunk if the trunk is still cached."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
from starlette.responses import Response

from motet.api.generation.answer import GeneratedResponse
from motet.api.generation.answer_writer import GroupsWriter
from motet.api.generation.groups import TokenGroup
from motet.api.generation.plan import Plan
from motet.api.http.failure import MakeNames
from motet.api.known_groups import FurtherChoices, KnownGroup, MoreChoices
from motet.api.service import Service
from motet.ids import RequestId
from motet.text.text_group import GroupStep
from motet.types import Usage

MakeWriter = Callable[[Plan, bool], GroupsWriter]
"""Makes the writer of an answer. The second argument is True if the answer is streamed."""


def answer_plan(
    service: Service,
    plan: Plan,
    *,
    writer: GroupsWriter,
    more: MakeWriter | None = None,
    names: MakeNames | None = None,
) -> GeneratedResponse[GroupStep, Usage]:
    """Returns the first answer. `more`: makes the writers of answers with more choices; None if there can be none.
    `names`: see `GeneratedResponse`."""
    known: list[KnownGroup | None] = [None] * len(plan.groups)
    if plan.client is not None:
        scored = any(group.sampling.prompt_logprobs is not None for group in plan.groups)
        answers = None if more is None or scored or len(plan.groups) > 1 else MoreAnswers(service, plan, more)
        known = [_known(plan, plan.client, number=number, more=answers) for number in range(len(plan.groups))]
    return _answer(service, plan, known=known, writer=writer, names=names)


@dataclass(frozen=True)
class MoreAnswers:
    """Makes answers with more choices of the only prompt of a plan."""

    service: Service
    plan: Plan
    make: MakeWriter

    def __call__(self, known: KnownGroup, request: MoreChoices) -> Response:
        (group,) = self.plan.groups
        max_n = self.plan.served.max_group(self.service.config)
        self.service.check_size(known.client, num_prompts=1, n=request.n, max_n=max_n, prompt_param="n")
        starts, sampling = known.further.take(request.n), group.sampling
        if not self.plan.rules.logprobs:  # the policy needed them, and more choices have none
            sampling = msgspec.structs.replace(sampling, logprobs=None)
        added = msgspec.structs.replace(
            group,
            request_id=RequestId(f"{group.request_id}+from{starts[0].index}"),
            choices=starts,
            ticket=None,
            sampling=sampling,
        )
        plan = replace(
            self.plan,
            groups=(added,),
            policy=None,
            span=request.span._replace(operation=self.plan.span.operation),
            include_usage=request.include_usage or self.service.config.enable_force_include_usage,
            continuous_usage=request.continuous_usage or self.service.config.enable_force_include_usage,
        )
        return _answer(self.service, plan, known=[known], writer=self.make(plan, request.stream))


def _known(plan: Plan, client: str, *, number: int, more: MoreAnswers | None) -> KnownGroup:
    group, first = plan.groups[number], plan.groups[number].choices[0]
    next_index = max(start.index for start in group.choices) + 1
    return KnownGroup(
        id=group.request_id,
        client=client,
        model=plan.head.model,
        created=plan.head.created,
        prompt_tokens=len(group.prompt),
        keep_s=group.keep_s,
        further=FurtherChoices(first_seed=(first.seed - first.index) % 2**64, next_index=next_index),
        body_bytes=plan.body_bytes,
        more=more,
    )


def _answer(
    service: Service,
    plan: Plan,
    *,
    known: Sequence[KnownGroup | None],
    writer: GroupsWriter,
    names: MakeNames | None = None,
) -> GeneratedResponse[GroupStep, Usage]:
    groups = [TokenGroup(service, plan, number=number, known=group) for number, group in enumerate(known)]
    answer = GeneratedResponse(
        service, groups, writer=writer, client=plan.client, num_choices=plan.num_choices, names=names
    )
    answer.headers.update(plan.capped_headers())
    return answer

"""`POST /v1/completions`: several prompts, n choices of each."""

from collections.abc import Sequence
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from motet.api.generation.answer import GroupsWriter, TokenChunks, spans_before
from motet.api.generation.collect import LogprobFields, WholeChoice, WholeGroup, WholeWriter, usage_json, usage_shape
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import RequestContext, request_context
from motet.api.generation.plan import GROUP_CHARS, Plan, RouteOptions, check_size, held_to, make_plan
from motet.api.generation.prompts import beside_the_loop, completion_prompts
from motet.api.http.caller import caller_of
from motet.api.http.routes import PostRoute, drop_body, new_router, read_body
from motet.api.openai.completions_schema import DEFAULT_MAX_TOKENS, CompletionRequest
from motet.api.service import Service
from motet.api.texts.text_requests import answer_from_texts, pass_through
from motet.engines.upstream.text_source import TextRoute
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import CompletionLogprobs, PromptEcho, completion_logprobs, echo
from motet.text.text_group import GroupStep
from motet.types import PromptReport, TokenLogprob, Usage


def completion_router(service: Service) -> APIRouter:
    router = new_router()

    async def completions(request: Request) -> Response:
        passed = await pass_through(service, request)
        if passed is not None:  # the body's `model` is on a third-party text server, which reads the rest of the body
            return answer_from_texts(service, passed, route=TextRoute.COMPLETIONS, request=request)
        response = await answer_completions(service, await read_body(request, CompletionRequest), request=request)
        drop_body(request)
        return response

    summary = "n answers to each of several prompts"
    router.routes.append(PostRoute("/v1/completions", completions, body=CompletionRequest, summary=summary))
    return router


async def answer_completions(service: Service, body: CompletionRequest, *, request: Request) -> Response:
    """Returns the answer of a model that takes tokens."""
    caller = caller_of(request, session=body.session_id)
    async with request_context(service, body, caller=caller, num_choices=body.num_drawn) as context:
        body = body.without_answer() if context.order else body
        plan = await plan_completions(service, body, context=context)

        def write(plan: Plan, stream: bool) -> GroupsWriter:
            return (CompletionChunks if stream else CompletionBody)(plan, body)

        echoed = sum(len(group.prompt) for group in plan.groups) if body.echo else 0
        size = echoed + GROUP_CHARS // 4 * plan.num_choices
        writer = await beside_the_loop(partial(write, plan, body.stream), size)
        return answer_plan(service, plan, writer=writer, more=write if body.num_drawn == body.n else None)


async def plan_completions(service: Service, body: CompletionRequest, *, context: RequestContext) -> Plan:
    """Returns the plan of checked completions."""
    ranked = body.num_drawn > body.n
    options = RouteOptions(
        context=context,
        prefix="cmpl",
        prompt_param="prompt",
        num_choices=body.num_drawn,
        count_param="best_of" if ranked else "n",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=0 if body.logprobs is None and ranked else body.logprobs,
        prompt_logprobs=max(asked) if (asked := _prompt_logprobs(body)) else None,
        prompt_only=body.prompt_only,
        group=body.group,
    )
    check_size(service, len(body.prompt), options=options)
    prompts = await completion_prompts(context.served.preparer, body.prompt, add_special_tokens=body.add_special_tokens)
    options = await held_to(options, body.form)
    plan = partial(make_plan, service, prompts, sampling=body, around=body, options=options)
    return await beside_the_loop(plan, GROUP_CHARS * len(prompts))


def _prompt_logprobs(body: CompletionRequest) -> list[int]:
    """Returns how many alternatives the fields ask for that score the prompt."""
    return [asked for asked in (body.prompt_logprobs, body.logprobs if body.echo else None) if asked is not None]


class CompletionTexts:
    """The parts of a choice beside its own text: the prompt, if it is repeated (`echo`), and log-probabilities."""

    def __init__(self, plan: Plan, body: CompletionRequest) -> None:
        self._plan = plan
        self._tokenizer = plan.served.tokenizer
        self.num_top = body.listed(body.logprobs)
        """Tokens told beside each drawn one, None without log-probabilities."""
        self._num_prompt_top = body.logprobs
        self._as_ids = body.return_tokens_as_token_ids
        self._echoes: list[PromptEcho] = []
        """The prompts to repeat, in the order of the groups; a text is repeated as it was written."""
        if body.echo:
            for group, prompt in zip(plan.groups, body.prompt, strict=True):
                shown = echo(self._tokenizer, group.prompt, skip_special_tokens=plan.rules.skip_special_tokens)
                self._echoes.append(PromptEcho(prompt, shown.offsets) if isinstance(prompt, str) else shown)

    def prompt(self, group: int) -> str:
        """Returns the prompt as it is repeated, or nothing."""
        return self._echoes[group].text if self._echoes else ""

    def prompt_logprobs(self, group: int, report: PromptReport | None) -> CompletionLogprobs | None:
        if not self._echoes or self._num_prompt_top is None or report is None or report.logprobs is None:
            return None
        ids, at = self._plan.groups[group].prompt, self._echoes[group].offsets
        return self._form(ids, report.logprobs, offsets=at, num_top=self._num_prompt_top)

    def logprobs(self, group: int, event: ChoiceEvent) -> CompletionLogprobs | None:
        if self.num_top is None:
            return None
        base, entries = len(self.prompt(group)), event.logprobs or ()
        ids, offsets = [entry.token_id for entry in entries], [base + offset for offset in event.offsets or ()]
        return self._form(ids, entries, offsets=offsets, num_top=self.num_top)

    def _form(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], *, offsets: Sequence[int], num_top: int
    ) -> CompletionLogprobs:
        return completion_logprobs(
            self._tokenizer, ids, logprobs=logprobs, offsets=offsets, num_top=num_top, as_ids=self._as_ids
        )


class CompletionBody(WholeWriter):
    """Completions answered in one piece; the place where `best_of` chooses."""

    def __init__(self, plan: Plan, body: CompletionRequest) -> None:
        super().__init__(plan)
        self._texts = CompletionTexts(plan, body)
        self._num_sent = body.n
        """Choices of each prompt to send."""
        self._ranked = body.num_drawn > body.n
        """True if they are the best of several."""
        self._num_prompt_top = body.prompt_logprobs
        self._token_ids = body.return_token_ids

    def close(self, usage: Usage) -> Sequence[bytes]:
        choices = (
            self._choice(number, rank if self._ranked else choice.index, choice=choice)
            for number, group in enumerate(self._groups)
            for rank, choice in enumerate(self._best(group) if self._ranked else group.choices)
        )
        return self.whole("text_completion", choices, usage=usage_shape(usage))

    def _best(self, group: WholeGroup) -> list[WholeChoice]:
        return sorted(group.choices, key=lambda choice: -choice.mean_logprob)[: self._num_sent]

    def _logprobs_of(self, group: int, event: ChoiceEvent) -> LogprobFields | None:
        return self._texts.logprobs(group, event)

    def _choice(self, group: int, number: int, *, choice: WholeChoice) -> dict[str, object]:
        """`number`: of the choice among those of its prompt."""
        prompt = self._texts.prompt_logprobs(group, self._groups[group].prompt)
        ids = {"token_ids": choice.token_ids, "prompt_token_ids": self._plan.groups[group].prompt}
        return {
            "index": group * self._num_sent + number,
            "text": self._texts.prompt(group) + choice.text,
            "logprobs": None if choice.logprobs is None else choice.logprob_fields(before=prompt),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
            **(ids | choice.span_fields() if self._token_ids else {}),
            **self.prompt_logprobs(group, self._num_prompt_top),
        }


AFTER_TEXT = b',"logprobs":null,"finish_reason":null}]'


class CompletionChunks(TokenChunks):
    """Streamed completions: prompts x n choices numbered prompt-major."""

    def __init__(self, plan: Plan, body: CompletionRequest) -> None:
        plain = body.logprobs is None and not body.return_token_ids
        super().__init__(
            plan, "text_completion", usage_json=usage_json, before=b',"text":', after=AFTER_TEXT, plain=plain
        )
        self._plan = plan
        self._texts = CompletionTexts(plan, body)
        self._token_ids = body.return_token_ids
        self._opens = body.echo or body.return_token_ids
        """True if each choice begins with a chunk about the prompt."""
        self._prompts: dict[int, PromptReport] = {}
        """The reports on the prompts, for choices that begin later."""

    def _openings(self, step: GroupStep, indices: Sequence[int], *, closing: bytes) -> list[bytes]:
        """The echo, and the prompt's token ids."""
        if not self._opens:
            return []
        if step.prompt is not None:
            self._prompts[step.group] = step.prompt
        tail = b""
        if self._token_ids:
            tail = b',"prompt_token_ids":%b,"token_ids":[]' % msgspec.json.encode(self._plan.groups[step.group].prompt)
        constant = b'%b,"logprobs":%b,"finish_reason":null%b}]%b' % (
            msgspec.json.encode(self._texts.prompt(step.group)),
            msgspec.json.encode(self._texts.prompt_logprobs(step.group, self._prompts.get(step.group))),
            tail,
            closing,
        )
        first = step.group * self._size
        return [self._before_text[first + index] + constant for index in indices]

    def _chunks(self, event: ChoiceEvent, group: int, *, closing: bytes) -> list[bytes]:
        finish = b"null"
        if event.finish:
            finish = b'"%b","stop_reason":%b' % (event.finish.encode(), msgspec.json.encode(event.stop_reason))
        chunk = b'%b%b,"logprobs":%b,"finish_reason":%b%b%b' % (
            self._before_text[group * self._size + event.index],
            msgspec.json.encode(event.text),
            msgspec.json.encode(self._texts.logprobs(group, event)),
            finish,
            self._ids_before(b"}]", event),
            closing,
        )
        return [chunk]

    def _ids_before(self, closing: bytes, event: ChoiceEvent) -> bytes:
        if not self._token_ids:
            return closing
        return b',"token_ids":' + msgspec.json.encode(event.token_ids) + spans_before(closing, event)

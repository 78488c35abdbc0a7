"""The groups that read the answers to the questions of a request.

Each question has a prompt and answers, which are sequences of tokens (`TokenizedQuestion`). Each choice of a group
reads one place: it starts with the tokens of an answer before this place, and generates one token. Log-probabilities
are reported for the tokens that answers have at this place."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from motet.api.generation.kv_params import RequestContext
from motet.api.generation.plan import GROUP_CHARS, Plan, RouteOptions, check_size, make_plan
from motet.api.generation.prompts import work_pieces
from motet.api.generation.request_fields import RequestFields, SamplingFields, StreamingFields
from motet.api.http.failure import invalid_value
from motet.api.openai.chat_plan import chat_text
from motet.api.openai.chat_schema import ChatPrompt
from motet.api.scoring.answer_reads import AnswerReads, Read, Tokens
from motet.api.scoring.continuations import MAX_JOINED_CHARS
from motet.api.scoring.decision_prompts import QuestionPrompts
from motet.api.scoring.questions import AnyQuestion
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.errors import RequestError
from motet.types import ChoiceStart, GenerateRequest, LogprobsMode

PARAM = "questions"
INPUT = "input"
MAX_ANSWER_TOKENS = 64
"""Maximum number of tokens of an answer. Each token but the first needs a read."""
MAX_PROMPT_TOKENS = 2_000_000
"""Maximum number of tokens of all prompts together. Every prompt contains the input."""


class TokenizedQuestion(NamedTuple):
    """A question with its tokens."""

    question: AnyQuestion
    prompt: Tokens
    reads: AnswerReads


class ReadGroup(NamedTuple):
    """The reads of one group."""

    number: int
    """Number of the question."""
    reads: Sequence[Read]
    """One for each choice."""

    @property
    def deepest(self) -> int:
        """The largest number of tokens of an answer before a place."""
        return max(len(read.place) for read in self.reads)

    def applied_to(self, group: GenerateRequest) -> GenerateRequest:
        """Returns a group with a choice for each read. Whatever token a choice generates ends it."""
        token_ids = tuple(dict.fromkeys(token for read in self.reads for token in read.token_ids))
        only = token_ids if self.deepest else ()  # without answers of several tokens, `max_tokens` is 1
        sampling = msgspec.structs.replace(
            group.sampling,
            max_tokens=self.deepest + 1,
            logprob_token_ids=token_ids,
            allowed_token_ids=only,
            stop_token_ids=only,
        )
        seed = group.choices[0].seed
        starts = tuple(ChoiceStart(index, seed, read.place) for index, read in enumerate(self.reads))
        return msgspec.structs.replace(group, choices=starts, sampling=sampling)


async def tokenized_questions(
    service: Service, questions: Sequence[AnyQuestion], *, chat: Callable[[], ChatPrompt], context: RequestContext
) -> list[TokenizedQuestion]:
    """Returns questions with their tokens. `chat`: makes the chat of the input, with a mark in place of a question.
    Raises `RequestError` for an input, an answer, or a number of tokens that the model or the server cannot take."""
    check_size(service, len(questions), options=_options(context))
    served, caller, config = context.served, context.caller, service.config
    if served.formats.harmony:
        message = "Answers of this model start on a channel, so /v1/decisions cannot read them: use /v1/score."
        raise RequestError(message, param="model", code="unsupported_model")
    preparer = served.preparer
    rendered = await chat_text(preparer, await caller.in_thread_if_long(chat), caller=caller, config=config)
    control = None if config.control_tokens_in_messages else served.tokenizer.control_tokens.texts
    texts = await caller.in_thread_if_long(lambda: [question.prompt for question in questions])

    def started() -> QuestionPrompts:
        prompts = QuestionPrompts(preparer, rendered, control=control, param=INPUT)
        first = prompts.start(texts[0])
        thinking = served.formats.thinking(first)
        if thinking is not None and thinking.opened:
            why = "the model's chat template starts answers with reasoning; turn it off, if the template can"
            raise invalid_value("chat_template_kwargs", why)
        _check_tokens(prompts.num_shared * len(texts))
        return prompts

    prompts = await caller.in_thread_if_long(started, max(caller.work_size, len(rendered.text)))
    sizes = [prompts.num_chars(text, question.answers) for text, question in zip(texts, questions, strict=True)]
    if (total := sum(sizes)) > MAX_JOINED_CHARS:
        why = f"{total} characters must be tokenised for them, and they can have at most {MAX_JOINED_CHARS}"
        raise invalid_value(PARAM, f"{why}; send fewer questions")
    ends, tokenized, num_reads = _ends(served), list[TokenizedQuestion](), 0
    for piece in work_pieces(sizes):

        def add_piece(piece: range = piece) -> None:
            nonlocal num_reads
            for number in piece:
                tokenized.append(_tokenized(number, questions[number], prompts=prompts, ends=ends))
                num_reads += tokenized[-1].reads.num_places
                _check_reads(num_reads, config.max_choices)  # reads of long answers take megabytes

        await caller.in_thread_if_long(add_piece, total)
        await asyncio.sleep(0)  # other tasks run, also if the body is short
    _check_tokens(sum(len(one.prompt) for one in tokenized))
    return tokenized


def _ends(served: ServedModel) -> Tokens:
    """Returns the tokens that end a reply. vLLM's servers do not report them; the tokenizer then names one."""
    named = served.tokenizer.special_tokens.get(served.tokenizer.named_tokens.get("eos_token", ""))
    return served.info.eos_token_ids or (() if named is None else (named,))


def _tokenized(number: int, question: AnyQuestion, *, prompts: QuestionPrompts, ends: Tokens) -> TokenizedQuestion:
    """Returns a question with its tokens. Raises `RequestError` for answers that have no probabilities of their own."""
    answers, numbers = list[Tokens](), dict[Tokens, int]()
    for place, answer in enumerate(question.answers):
        param = f"{PARAM}[{number}].{question.answer_param(place)}"
        ids = prompts.answer(answer, param=param)
        if len(ids) > MAX_ANSWER_TOKENS:
            raise invalid_value(param, f"it has {len(ids)} tokens, and an answer can have at most {MAX_ANSWER_TOKENS}")
        if (other := numbers.setdefault(ids, place)) != place:
            raise invalid_value(param, f"it has the same tokens as '{PARAM}[{number}].{question.answer_param(other)}'")
        answers.append(ids)
    reads = AnswerReads(answers, ends=ends)
    if reads.unfinished and not ends:
        param = f"{PARAM}[{number}].{question.answer_param(numbers[reads.unfinished[0]])}"
        raise invalid_value(param, "another answer starts with its tokens, and the model has no end-of-sequence token")
    return TokenizedQuestion(question, prompts.prompt(question.prompt), reads)


def _check_tokens(num_tokens: int) -> None:
    if num_tokens > MAX_PROMPT_TOKENS:
        why = f"the input in each of them has {num_tokens} tokens, and a request can have {MAX_PROMPT_TOKENS}"
        raise invalid_value(PARAM, f"{why}; send fewer questions")


def _check_reads(num_reads: int, maximum: int) -> None:
    if num_reads > maximum:
        numbers = f"their answers need at least {num_reads} reads, while one request can have at most {maximum}"
        message = f"Too many choices: {numbers} (--max-choices). Send fewer questions, or shorter answers."
        raise RequestError(message, param=PARAM, code="too_many_choices")


async def decision_plan(
    service: Service, questions: Sequence[TokenizedQuestion], *, request: RequestFields, context: RequestContext
) -> tuple[Plan, Sequence[ReadGroup]]:
    """Returns the plan of a request, and the reads of its groups. Raises `RequestError` for too many reads."""
    options, config = _options(context), service.config
    max_reads = context.served.max_group(config)
    groups = [
        ReadGroup(number, reads)
        for number, one in enumerate(questions)
        for reads in one.reads.groups(max_reads=max_reads)
    ]
    _check_reads(sum(len(group.reads) for group in groups), config.max_choices)
    check_size(service, len(groups), options=options)
    options = replace(options, prompt_param=INPUT)
    sampling = SamplingFields.model_validate(
        {"max_tokens": 1 + max(group.deepest for group in groups), "temperature": 0.0}
    )
    prompts = [questions[group.number].prompt for group in groups]

    def made() -> Plan:
        plan = make_plan(service, prompts, sampling=sampling, request=request, options=options)
        rules = msgspec.structs.replace(plan.rules, client_sent_output=True)
        read = tuple(group.applied_to(made) for group, made in zip(groups, plan.groups, strict=True))
        return replace(plan, groups=read, rules=rules)

    size = max(context.caller.work_size, GROUP_CHARS * len(groups), sum(map(len, prompts)) // GROUP_CHARS)
    return await context.caller.in_thread_if_long(made, size), groups


def _options(context: RequestContext) -> RouteOptions:
    return RouteOptions(
        context=context,
        streaming=StreamingFields(),
        prefix="decision",
        prompt_param=PARAM,
        num_choices=1,
        ignores_defaults=True,
        logprobs=0,
        logprobs_mode=LogprobsMode.RAW,
    )

"""The groups of a request to `/v1/decisions`.

The prompt and the answers of a question are sequences of tokens (`TokenizedQuestion`). Each choice of a group performs
one read: its output starts with a prefix of an answer, and it generates one token, with the log-probabilities of the
tokens that follow this prefix in the answers."""

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
"""Maximum number of tokens of an answer. Each token but the first needs a read of its own."""
MAX_PROMPT_TOKENS = 2_000_000
"""Maximum number of tokens of all prompts together. Every prompt contains the input."""


class TokenizedQuestion(NamedTuple):
    """A question with its tokens."""

    question: AnyQuestion
    prompt: Tokens
    reads: AnswerReads


class ReadGroup(NamedTuple):
    """The reads of one group."""

    question: int
    """Index of the question."""
    reads: Sequence[Read]
    """One for each choice."""

    @property
    def longest_prefix(self) -> int:
        """Number of tokens of the longest prefix."""
        return max(len(read.prefix) for read in self.reads)

    def applied_to(self, group: GenerateRequest) -> GenerateRequest:
        """Returns the group with a choice for each read. Each choice ends after one token."""
        token_ids = tuple(dict.fromkeys(token for read in self.reads for token in read.token_ids))
        # `max_tokens` counts the prefix too: choices with shorter prefixes need another reason to end.
        only = token_ids if self.longest_prefix else ()
        sampling = msgspec.structs.replace(
            group.sampling,
            max_tokens=self.longest_prefix + 1,
            logprob_token_ids=token_ids,
            allowed_token_ids=only,
            stop_token_ids=only,
        )
        seed = group.choices[0].seed
        starts = tuple(ChoiceStart(index, seed, read.prefix) for index, read in enumerate(self.reads))
        return msgspec.structs.replace(group, choices=starts, sampling=sampling)


async def tokenized_questions(
    service: Service, questions: Sequence[AnyQuestion], *, chat: Callable[[], ChatPrompt], context: RequestContext
) -> list[TokenizedQuestion]:
    """Returns questions with their tokens. `chat`: returns the chat of the input, with a placeholder for the question.
    Raises `RequestError` for an input or an answer that cannot be used, and for too many tokens."""
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
            why = "the chat template starts answers with reasoning; turn it off, if the template has a variable for it"
            raise invalid_value("chat_template_kwargs", why)
        _check_tokens(prompts.num_shared * len(texts))
        return prompts

    prompts = await caller.in_thread_if_long(started, max(caller.work_size, len(rendered.text)))
    sizes = [prompts.num_chars(text, question.answers) for text, question in zip(texts, questions, strict=True)]
    if (total := sum(sizes)) > MAX_JOINED_CHARS:
        why = f"{total} characters must be tokenised for them; the maximum is {MAX_JOINED_CHARS}"
        raise invalid_value(PARAM, f"{why}; send fewer questions")
    end_token_ids, tokenized, num_reads = _end_token_ids(served), list[TokenizedQuestion](), 0
    for piece in work_pieces(sizes):

        def add_piece(piece: range = piece) -> None:
            nonlocal num_reads
            for number in piece:
                tokenized.append(_tokenized(number, questions[number], prompts=prompts, end_token_ids=end_token_ids))
                num_reads += tokenized[-1].reads.num_prefixes
                _check_reads(num_reads, config.max_choices)  # reads of long answers take megabytes

        await caller.in_thread_if_long(add_piece, total)
        await asyncio.sleep(0)  # other tasks run, also if the body is short
    _check_tokens(sum(len(one.prompt) for one in tokenized))
    return tokenized


def _end_token_ids(served: ServedModel) -> Tokens:
    """Returns the tokens that end a reply. For vLLM's servers, which do not report them, this is `eos_token` of the
    tokenizer."""
    named = served.tokenizer.special_tokens.get(served.tokenizer.named_tokens.get("eos_token", ""))
    return served.info.eos_token_ids or (() if named is None else (named,))


def _tokenized(
    number: int, question: AnyQuestion, *, prompts: QuestionPrompts, end_token_ids: Tokens
) -> TokenizedQuestion:
    """Returns a question with its tokens. Raises `RequestError` for an answer that is too long, or whose tokens are the
    tokens of another one."""
    answers, index_of = list[Tokens](), dict[Tokens, int]()
    for index, answer in enumerate(question.answers):
        param = f"{PARAM}[{number}].{question.answer_param(index)}"
        ids = prompts.answer(answer, param=param)
        if len(ids) > MAX_ANSWER_TOKENS:
            raise invalid_value(param, f"it has {len(ids)} tokens; an answer can have at most {MAX_ANSWER_TOKENS}")
        if (other := index_of.setdefault(ids, index)) != index:
            raise invalid_value(param, f"it has the same tokens as '{PARAM}[{number}].{question.answer_param(other)}'")
        answers.append(ids)
    reads = AnswerReads(answers, end_token_ids=end_token_ids)
    if reads.prefix_answers and not end_token_ids:
        param = f"{PARAM}[{number}].{question.answer_param(index_of[reads.prefix_answers[0]])}"
        raise invalid_value(param, "another answer starts with its tokens, and the model has no end-of-sequence token")
    return TokenizedQuestion(question, prompts.prompt(question.prompt), reads)


def _check_tokens(num_tokens: int) -> None:
    if num_tokens > MAX_PROMPT_TOKENS:
        why = f"their prompts have {num_tokens} tokens, with the input in each; the maximum is {MAX_PROMPT_TOKENS}"
        raise invalid_value(PARAM, f"{why}; send fewer questions")


def _check_reads(num_reads: int, maximum: int) -> None:
    if num_reads > maximum:
        why = f"the answers need at least {num_reads} reads, each of them a choice; a request can have {maximum}"
        message = f"Too many choices: {why} (--max-choices). Send fewer questions, or shorter answers."
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
        {"max_tokens": 1 + max(group.longest_prefix for group in groups), "temperature": 0.0}
    )
    prompts = [questions[group.question].prompt for group in groups]

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

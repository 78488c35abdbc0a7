"""One chunk of a generated choice as a chunk of OpenAI's routes. The server keeps nothing between two chunks:

    chunk 1, no state ─► chunk, state 1        the client sends each state with the next chunk
    chunk 2, state 1  ─► chunk, state 2

A state has the tokens that must be read again: for a plain text the last ones, for an answer with reasoning, tool calls
or stop strings all output tokens. Reading them takes 5 us each, in turns with other clients, and
the model's length limits their number.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import msgspec
from fastapi import Response
from msgspec.json import encode as json_bytes

from motet.api.generation.answer_writer import num_listed, usage_shape
from motet.api.generation.plan import Plan
from motet.api.http.caller import Caller
from motet.api.openai.chat_completions import hides_tokens
from motet.api.openai.chat_schema import ChatRequest
from motet.api.openai.completions import CompletionRequest
from motet.api.vllm.derender_schema import (
    UNKNOWN_PROMPT,
    ChatDerender,
    CompletionDerender,
    GeneratedChunkChoice,
)
from motet.text.choice import ChoiceEvent, ChoiceStream, replay_from
from motet.text.detokenize import LOOK_BACK
from motet.text.logprobs import chat_logprobs, completion_logprobs
from motet.text.parts import Content, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.prepare import PromptPreparer
from motet.types import ChoiceDelta, ChoiceStart, TokenLogprob, Usage

PIECE_TOKENS = 2**12
"""Number of tokens after which a piece of work ends, and other clients have their turn."""


class DerenderedChunk(ABC):
    """Reads the tokens before a chunk (`replay`), and then the chunk."""

    kind: str

    def __init__(self, plan: Plan, body: ChatDerender | CompletionDerender) -> None:
        self.plan = plan
        self.body = body
        prompt, past = plan.groups[0].prompt, tuple(body.state.output_token_ids)
        self._prompt = () if prompt == tuple(UNKNOWN_PROMPT) else prompt
        rules = plan.rules_of(0)
        self._is_plain = rules.format is None and rules.stops is None
        """True if only the last tokens matter for the text of the next."""
        self._rules = msgspec.structs.replace(rules, logprobs=rules.logprobs and not self._is_plain)
        self._num_shown = body.state.num_chars
        start = ChoiceStart(body.index, 0, past if self._is_plain else ())
        self._stream = ChoiceStream(start, self._prompt, tokenizer=plan.served.tokenizer, rules=self._rules)

    @property
    def pieces(self) -> Iterable[Sequence[int]]:
        """The tokens to replay, in pieces."""
        past = () if self._is_plain else self.body.state.output_token_ids
        return (past[place : place + PIECE_TOKENS] for place in range(0, len(past), PIECE_TOKENS))

    def replay(self, tokens: Sequence[int]) -> None:
        self._stream.feed(ChoiceDelta(self._stream.index, tuple(tokens)))

    def response(self) -> bytes:
        head, body = self.plan.head, self.body
        choices = [self._choice(choice) for choice in body.chunk.choices]
        chunk = {
            "id": body.chunk.request_id,
            "object": self.kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": self._usage(),
            **self.prompt_fields(),
        }
        return json_bytes({"chunk": chunk, "stream_state": self._state()})

    @abstractmethod
    def content(self, events: Sequence[ChoiceEvent]) -> dict[str, object]:
        """Returns the fields of the choice with its new text or parts."""

    @abstractmethod
    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int]) -> object:
        """Returns the log-probabilities of the chunk. `offsets`: where the text of each token starts."""

    @property
    @abstractmethod
    def shows_ids(self) -> bool:
        """True if the choice repeats its token ids."""

    def prompt_fields(self) -> dict[str, object]:
        """Returns the fields of the chunk with the prompt's token ids."""
        return {}

    @property
    def scored_prompt(self) -> dict[str, object]:
        """The field with the log-probabilities of the prompt, if the chunk has them."""
        scored = self.body.chunk.prompt_logprobs
        return {} if scored is None else {"prompt_logprobs": scored}

    def _choice(self, choice: GeneratedChunkChoice) -> dict[str, object]:
        stream, entries, offsets, events = self._stream, choice.logprob_entries, list[int](), list[ChoiceEvent]()
        ends = {*self.plan.served.info.eos_token_ids, *self.plan.served.tokenizer.special_ids}
        for delta in choice.deltas(ends.union(self.plan.groups[0].sampling.stop_token_ids)):
            for one in [delta] if entries is None else delta.single_tokens():
                offsets += [self._num_shown if self._is_plain else stream.num_chars] * len(one.token_ids)
                if (event := stream.feed(one)) is not None:
                    events.append(event)
                    self._num_shown += len(event.text)
        end = next((event for event in events if event.finish is not None), None)
        return {
            "index": choice.index,
            **self.content(events),
            "logprobs": None if entries is None else self.logprobs(entries, offsets),
            "finish_reason": None if end is None else end.finish,
            "stop_reason": None if end is None else (end.stop_reason or choice.stop_reason),
            **({"token_ids": choice.token_ids} if self.shows_ids else {}),
        }

    def _usage(self) -> dict[str, object] | None:
        if (given := self.body.chunk.usage) is None:
            return None
        counted = self.body.prompt_tokens
        num_tokens = counted[0] if isinstance(counted, list) else counted
        prompt_tokens = given.prompt_tokens if num_tokens is None else num_tokens
        return usage_shape(Usage(prompt_tokens=prompt_tokens, completion_tokens=given.completion_tokens))

    def _state(self) -> dict[str, object]:
        """Returns the state after the chunk, with no more tokens than the next chunk needs."""
        state, choices, first = self.body.state, self.body.chunk.choices, 0
        tokens = (*state.output_token_ids, *(token_id for choice in choices for token_id in choice.token_ids))
        if self._is_plain:
            first = max(0, replay_from(tokens, self.plan.served.tokenizer.special_ids, rules=self._rules) - LOOK_BACK)
        return {
            "output_token_ids": tokens[first:],
            "prompt_token_ids": () if first else self._prompt[-LOOK_BACK:],
            "num_chars": self._num_shown,
            "role_sent": state.role_sent or bool(choices),
        }


class ChatChunk(DerenderedChunk):
    kind = "chat.completion.chunk"

    def __init__(self, plan: Plan, request: ChatRequest, *, body: ChatDerender) -> None:
        super().__init__(plan, body)
        self._request = request
        self._hidden = hides_tokens(plan, request)

    @property
    def shows_ids(self) -> bool:
        return self._request.return_token_ids and not self._hidden

    def prompt_fields(self) -> dict[str, object]:
        ids = self.body.chunk.prompt_token_ids if self._request.return_token_ids else None
        return {"prompt_token_ids": ids, **self.scored_prompt}

    def content(self, events: Sequence[ChoiceEvent]) -> dict[str, object]:
        text, reasoning, calls = "", "", dict[int, dict[str, object]]()
        arguments = dict[int, str]()
        for event in events:
            for part in (Content(event.text),) if event.parts is None else event.parts:
                match part:
                    case Content(new):
                        text += new
                    case Reasoning(new):
                        reasoning += new if self._request.include_reasoning else ""
                    case ToolCallBegin(number, id, name):
                        calls[number] = {"index": number, "id": id, "type": "function", "function": {"name": name}}
                        arguments[number] = ""
                    case ToolCallArguments(number, new):
                        arguments[number] = arguments.get(number, "") + new
        for number, joined in arguments.items():
            call = calls.setdefault(number, {"index": number, "function": {}})
            call["function"] = {**cast(dict[str, str], call["function"]), "arguments": joined}
        is_first = not self.body.state.role_sent
        delta = {
            **({"role": "assistant"} if is_first else {}),
            **({"content": text or None} if is_first or text else {}),
            **({"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}),
            **({"tool_calls": [*calls.values()]} if calls else {}),
        }
        return {"delta": delta}

    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int]) -> object:
        num_top = num_listed(self._request, self._request.num_logprobs)
        if num_top is None or self._hidden:
            return None
        as_ids = self._request.return_tokens_as_token_ids
        content = chat_logprobs(self.plan.served.tokenizer, entries, num_top=num_top, as_ids=as_ids)
        return {"content": content, "refusal": None}


class CompletionChunk(DerenderedChunk):
    kind = "text_completion"

    def __init__(self, plan: Plan, request: CompletionRequest, *, body: CompletionDerender) -> None:
        super().__init__(plan, body)
        self._request = request

    @property
    def shows_ids(self) -> bool:
        return self._request.return_token_ids

    def content(self, events: Sequence[ChoiceEvent]) -> dict[str, object]:
        text = "".join(event.text for event in events)
        ids = {"prompt_token_ids": self.body.chunk.prompt_token_ids} if self.shows_ids else {}
        return {"text": text, **ids, **self.scored_prompt}

    def logprobs(self, entries: Sequence[TokenLogprob], offsets: Sequence[int]) -> object:
        num_top = num_listed(self._request, self._request.logprobs)
        if num_top is None:
            return None
        # Entries without a token, and tokens without an entry, have no place in the text of their own.
        last = offsets[-1] if offsets else self.body.state.num_chars
        places = [*offsets[: len(entries)], *[last] * (len(entries) - len(offsets))]
        ids, tokenizer = [entry.token_id for entry in entries], self.plan.served.tokenizer
        as_ids = self._request.return_tokens_as_token_ids
        return completion_logprobs(tokenizer, ids, logprobs=entries, offsets=places, num_top=num_top, as_ids=as_ids)


def check_state(preparer: PromptPreparer, body: ChatDerender | CompletionDerender) -> None:
    """Raises RequestError for tokens that the model does not have, and for more tokens than its context can have."""
    state, given = body.state, body.prompt_token_ids or []
    prompts: list[int | list[int] | None] = [*given]
    prompt = [token_id for one in prompts for token_id in ([one] if isinstance(one, int) else one or [])]
    for ids in (state.output_token_ids, state.prompt_token_ids):
        if ids:
            preparer.check_prompt(ids, param="stream_state")
    tokens = [token_id for choice in body.chunk.choices for token_id in choice.token_ids]
    preparer.check_length([*prompt, *state.output_token_ids, *tokens], param="stream_state")


async def chunk_response(chunk: DerenderedChunk, *, caller: Caller) -> Response:
    state, choices = chunk.body.state, chunk.body.chunk.choices
    size = len(state.output_token_ids) + sum(len(choice.token_ids) for choice in choices)
    size += len(chunk.body.chunk.prompt_logprobs or ())
    for piece in chunk.pieces:
        await caller.in_thread_if_long(partial(chunk.replay, piece), size)
    return Response(await caller.in_thread_if_long(chunk.response, size), media_type="application/json")

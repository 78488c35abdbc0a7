"""Which decode replica gets a request whose body is known: by what each has cached of its prompt, by load and session.

It is the choice of a gateway, made of the same parts, without its streams: who is there is learnt from the directory,
what they have cached and how busy they are from themselves; the prompt becomes tokens as it does in the server. What a
replica gets through here is counted there until it tells itself what it has.

A body that cannot be read is no reason to refuse a request: the replica that gets it says what is wrong with it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import msgspec
from pydantic import ValidationError

from motet.api.prompts import chat_prompt, completion_prompts
from motet.api.schema_chat import ChatRequest
from motet.api.schema_completion import CompletionRequest
from motet.api.schema_generate import TokensRequest
from motet.api.served import Models, ServedModel, TextModel, model_named
from motet.errors import ModelNotFoundError, MotetError
from motet.ids import ModelName, new_request_id
from motet.routing.choose import Policy, Work, choose
from motet.routing.fleet import Fleet
from motet.routing.survey import survey
from motet.types import GenerateRequest, SamplingParams, choice_starts

logger = logging.getLogger(__name__)

NO_ANSWER = SamplingParams(max_tokens=1)
"""What is asked of the answer does not matter here."""


@dataclass(frozen=True)
class _Read:
    """A body, as far as it matters."""

    model: str
    """As its workers call it; empty: any."""
    prompt: Sequence[int]
    """The first of them."""
    choices: int
    """Of all prompts."""
    cache_salt: str = ""


UNREAD = _Read("", (), 1)


class PrefixChoice:
    """Over a fleet that others keep."""

    def __init__(self, fleet: Fleet, models: Models, policy: Policy) -> None:
        self._fleet = fleet
        self._models = models
        self._policy = policy
        self._turns = count()

    async def choose(self, body: bytes, session: str) -> str | None:
        """The URL of the replica; None: nobody is known."""
        request = _request(await self._read(body), session)
        turn = next(self._turns)
        seen = survey(self._fleet, Work.GENERATE, request, turn=turn)
        decision = seen and choose(seen.candidates, seen.wanted, self._policy, turn=turn)
        if not seen or not decision:
            return None
        member, _ = seen.present[decision.place]
        member.expect(len(request.choices))
        if session:
            self._fleet.sessions.keep(session, member.id)
        logger.debug("%s: %s", member.address, decision.why)
        return member.address

    async def _read(self, body: bytes) -> _Read:
        try:
            fields = msgspec.json.decode(body)
            if not isinstance(fields, dict):
                return UNREAD
            if "messages" in fields:
                return await self._chat(ChatRequest.model_validate(fields))
            if "prompt" in fields:
                return await self._completion(CompletionRequest.model_validate(fields))
            return self._tokens(TokensRequest.model_validate(fields)) if "token_ids" in fields else UNREAD
        except (msgspec.DecodeError, ValidationError, MotetError) as error:
            logger.debug("chosen without its prompt: %s", error)
            return UNREAD

    async def _chat(self, body: ChatRequest) -> _Read:
        served = self._served(body.model)
        return _Read(served.info.model, await chat_prompt(served.preparer, body), body.n, body.cache_salt)

    async def _completion(self, body: CompletionRequest) -> _Read:
        served = self._served(body.model)
        special = body.add_special_tokens
        prompts = await completion_prompts(served.preparer, body.prompt, add_special_tokens=special)
        return _Read(served.info.model, prompts[0], len(prompts) * body.num_drawn, body.cache_salt)

    def _tokens(self, body: TokensRequest) -> _Read:
        served = self._served(body.model)
        return _Read(served.info.model, body.token_ids, body.sampling_params.n, body.cache_salt)

    def _served(self, name: str | None) -> ServedModel:
        served = model_named(self._models, name)
        if isinstance(served, TextModel):
            raise ModelNotFoundError(f"{served.name} is not asked in tokens")
        return served


def _request(read: _Read, session: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=new_request_id("route"),
        prompt=tuple(read.prompt),
        choices=choice_starts(read.choices, 0),
        sampling=NO_ANSWER,
        cache_salt=read.cache_salt,
        session_id=session,
        model=ModelName(read.model),
    )

"""Chooses the decode replica for a request whose body is known: by cached prefix, by load and by session.

It chooses as a gateway does, but without its streams: the directory lists the replicas, and they report themselves what
they have cached and how busy they are. A request that was sent from here counts until the replica's next report.

A request whose body cannot be read is not refused here: the replica that gets it answers what is wrong. Serve chooses
while no replica is known, and if the choice fails.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import msgspec
from pydantic import ValidationError

from motet.api.generation.prompts import completion_prompts
from motet.api.openai.chat_plan import chat_prompt
from motet.api.openai.chat_schema import ChatRequest
from motet.api.openai.completions_schema import CompletionRequest
from motet.api.served import Models, ServedModel, TextModel, model_named
from motet.api.vllm.generate_schema import TokensRequest
from motet.deploy.ray.directory import DirectoryCopy, ListedWorkers, RayDirectory
from motet.deploy.ray.running import ReplicaTasks
from motet.deploy.server import make_gateway
from motet.deploy.server_plan import GatewayPlan
from motet.engines.http import server_client
from motet.errors import ModelNotFoundError, MotetError
from motet.ids import new_request_id
from motet.routing.choosing.choose import choose
from motet.routing.choosing.cost import WorkKind
from motet.routing.choosing.survey import survey
from motet.routing.workers.fleet import Fleet
from motet.types import GenerateRequest, Policy, Role, SamplingParams, choice_starts

logger = logging.getLogger(__name__)

NO_ANSWER = SamplingParams(max_tokens=1)  # the parameters of the answer do not matter here
NOBODY = ""


class PrefixChoice:
    """Chooses in a fleet that others keep."""

    def __init__(self, fleet: Fleet, models: Models, *, policy: Policy) -> None:
        self._fleet = fleet
        self._models = models
        self._policy = policy
        self._turns = count()

    async def choose(self, body: bytes, session: str) -> str | None:
        """Returns the URL of the replica; None if none is known."""
        request = await self._request(body, session)
        turn = next(self._turns)
        seen = survey(self._fleet, WorkKind.GENERATE, request=request, turn=turn)
        decision = seen and choose(seen.candidates, seen.needs, policy=self._policy, turn=turn)
        if not seen or not decision:
            return None
        member, _ = seen.present[decision.place]
        member.expect(len(request.choices))
        self._fleet.sessions[WorkKind.GENERATE].keep(session, member.id)
        logger.debug("%s: %s", member.address, decision.why)
        return member.address

    async def _request(self, body: bytes, session: str) -> GenerateRequest:
        unread = GenerateRequest(
            request_id=new_request_id("route"),
            prompt=(),
            choices=choice_starts(1, 0),
            sampling=NO_ANSWER,
            session_id=session,
        )
        try:
            return await self._read(msgspec.json.decode(body), unread)
        except (msgspec.DecodeError, ValidationError, MotetError) as error:
            logger.debug("chosen without its prompt: %s", error)
            return unread

    async def _read(self, fields: object, unread: GenerateRequest) -> GenerateRequest:
        """Returns the request with the body's model, first prompt, choices of all prompts, and cache salt."""
        prompt: Sequence[int]
        match fields:
            case {"messages": _}:
                chat = ChatRequest.model_validate(fields)
                served, salt, choices = self._served(chat.model), chat.cache_salt, chat.n
                prompt = await chat_prompt(served.preparer, chat)
            case {"prompt": _}:
                body = CompletionRequest.model_validate(fields)
                served, salt, special = self._served(body.model), body.cache_salt, body.add_special_tokens
                prompts = await completion_prompts(served.preparer, body.prompt, add_special_tokens=special)
                prompt, choices = prompts[0], len(prompts) * body.num_generated
            case {"token_ids": _}:
                tokens = TokensRequest.model_validate(fields)
                served, salt, choices = self._served(tokens.model), tokens.cache_salt, tokens.sampling_params.n
                prompt = tokens.token_ids
            case _:
                return unread
        return msgspec.structs.replace(
            unread, model=served.info.model, prompt=tuple(prompt), choices=choice_starts(choices, 0), cache_salt=salt
        )

    def _served(self, name: str | None) -> ServedModel:
        served = model_named(self._models(), name)
        if isinstance(served, TextModel):
            raise ModelNotFoundError(f"{served.name} does not take tokens")
        return served


class PrefixRouter:
    """The router in a replica of `--prefix-router`: a gateway over the decode replicas of the directory."""

    def __init__(self, plan: GatewayPlan, directory: RayDirectory) -> None:
        self._following = DirectoryCopy(directory)
        listed = ListedWorkers(self._following, (Role.DECODE, Role.BOTH))
        self._plan = replace(plan, introduces=False, listed=listed)
        self._companions = ReplicaTasks()
        self._choice: PrefixChoice | None = None

    async def start(self) -> None:
        client = await self._companions.enter_async_context(server_client(ca_file=self._plan.gateway.worker_ca_file))
        gateway, models = make_gateway(self._plan, client)
        self._companions.push_async_callback(gateway.close)
        self._choice = PrefixChoice(gateway.router.fleet, models, policy=self._plan.routing.routing_policy)
        self._companions.begin(self._following.follow())
        self._companions.begin(gateway.watch())

    async def replica(self, body: bytes, session: str) -> str:
        """Returns the replica's id in Serve, or NOBODY."""
        assert self._choice is not None  # it was started
        try:
            url = await self._choice.choose(body, session)
        except Exception:  # our own error must not refuse a request: Serve takes some replica
            logger.exception("no replica was chosen")
            return NOBODY
        known = (worker.id for worker in self._following.workers if worker.url == url)
        return next(known, NOBODY).rpartition("-")[2]

    def check(self) -> None:
        """Raises EngineDiedError if it cannot work any more."""
        self._companions.check()

    async def close(self) -> None:
        """May be called twice."""
        await self._companions.aclose()

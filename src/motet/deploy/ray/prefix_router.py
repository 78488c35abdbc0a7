"""What a replica of `--prefix-router` runs: a gateway's workers, none of its streams, and a `PrefixChoice` over them.

The workers are the decode replicas that the directory lists. It waits for none of them: while nobody is known Serve
chooses, as it does where a choice fails.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import replace

import msgspec

from motet.deploy.gateway_server import GatewayPlan, make_gateway
from motet.deploy.ray.directory import DirectoryClient
from motet.deploy.ray.following import Following, ListedWorkers
from motet.deploy.ray.prefix_choice import PrefixChoice
from motet.deploy.ways import Asking
from motet.engines.calls import server_client
from motet.errors import EngineDiedError
from motet.routing.choose import policy_named
from motet.types import Role

logger = logging.getLogger(__name__)

NOBODY = ""


class PrefixRouter:
    """One replica, from `start` to `close`."""

    def __init__(self, plan: GatewayPlan, directory: DirectoryClient) -> None:
        self._following = Following(directory)
        listed = ListedWorkers(self._following, (Role.DECODE, Role.BOTH))
        # Clients ask the same servers, so the key is theirs, if they need one.
        key = next(iter(plan.server.api_keys), None)
        config = msgspec.structs.replace(plan.gateway, worker_api_key=key)
        self._plan = replace(plan, gateway=config, introduces=False, listed=listed)
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._choice: PrefixChoice | None = None

    async def start(self) -> None:
        client = await self._stack.enter_async_context(server_client(ca_file=self._plan.gateway.worker_ca_file))
        gateway, models = make_gateway(self._plan, Asking(config=self._plan.gateway, client=client, pass_keys=False))
        self._stack.push_async_callback(gateway.close)
        self._choice = PrefixChoice(gateway.router.fleet, models, policy_named(self._plan.routing.routing_policy))
        self._begin(self._following.follow())
        self._begin(gateway.watch())

    async def replica(self, body: bytes, session: str) -> str:
        """Its id in Serve, or NOBODY."""
        assert self._choice is not None  # it was started
        try:
            url = await self._choice.choose(body, session)
        except Exception:  # a fault of ours is no reason to refuse a request: Serve finds some replica
            logger.exception("no replica was chosen")
            return NOBODY
        known = (worker.id for worker in self._following.workers if worker.url == url)
        return next(known, NOBODY).rpartition("-")[2]

    def check(self) -> None:
        """Raises EngineDiedError if it is of no use any more."""
        if not self._tasks or any(task.done() for task in self._tasks):
            raise EngineDiedError("nobody follows the workers any more")

    async def close(self) -> None:
        """Twice changes nothing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

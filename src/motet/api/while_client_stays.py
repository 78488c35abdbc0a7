"""Work for one client, which ends when the client leaves."""

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup
from starlette.types import Receive


async def while_client_stays(receive: Receive, work: Callable[[TaskGroup], Awaitable[None]]) -> None:
    """Runs `work` until it ends, or cancels it when the client leaves; so end the tasks it has started in its group."""
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await work(tasks)
            tasks.cancel_scope.cancel()

        # In a task of its own: each time a task wakes, all calls that await in it are gone through, and here those
        # of the framework would be among them.
        tasks.start_soon(run)
        while (await receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

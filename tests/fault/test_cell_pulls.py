"""A group is struck while decode fetches its KV from a prefill engine that is stopped, over TCP as between machines."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet.transfer.base import TransferError
from motet.transfer.ticket import TransferAddress
from tests.fault.answers import ask
from tests.fault.asked import CHAT, COUNTED, chat
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import RunningCell, eventually
from tests.fault.striking import Blow, StruckEngine, granted, hang, kill

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
async def shared(folder: Path, undisturbed: Undisturbed) -> AsyncIterator[RunningCell]:
    await undisturbed.start("float32")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("UCX_TLS", "tcp")
        async with RunningCell(folder, heartbeat_timeout_s=1.0, pull_timeout_s=5.0) as cell:
            yield cell


@pytest.mark.parametrize("blow", [kill, None], ids=["killed", "left"])
async def test_the_answer_is_the_undisturbed_one_with_a_decode_engine_that_in_its_pull_was(
    blow: Blow | None, cell: RunningCell, undisturbed: Undisturbed
) -> None:
    body = chat("pull killed" if blow else "pull left", COUNTED, n=8)
    expected = await undisturbed.answer(CHAT, body)
    moved = cell.moved
    cell.strikes.arm(granted, hang)
    with cell.all_on("decode-0"):
        asking = asyncio.create_task(ask(cell.http, CHAT, body))
        await pull_posted(cell.engine("decode-0"))
    (blow or cell.leave)(cell.engine("decode-0"))
    assert await asking == expected
    assert cell.moved == moved + 1


async def pull_posted(engine: StruckEngine) -> None:
    """The transfer thread obeys in order, and looks at every pull between two orders that did not come together."""

    async def ordered() -> bool:
        return (await engine.stats()).pulls_open == 1

    await eventually(ordered, "no pull was ordered")
    with pytest.raises(TransferError, match="no address"):
        await engine.connect(TransferAddress("nobody", "no address", 1))

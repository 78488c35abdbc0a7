"""The prefill side fails in many ways, and the client of a group reads the same choices as without a fault."""

import asyncio
import signal
from pathlib import Path

import msgspec
import pytest

from bench.servers.ports import free_port
from motet.errors import EngineError
from motet.transfer.orders import FailureKind
from motet.transfer.ticket import prompt_digest
from motet.types import GenerateRequest, Role
from tests.engines.native.drive import gb_of, group, prompt_of
from tests.fault.worker_pair import answer, kill, send, stop, ticket_of, undisturbed, until, worker_pair
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def request(name: str = "g", *, length: int = 300, seed: int = 0, n: int = 4) -> GenerateRequest:
    return group(name, prompt_of(length, seed), n=n, seed=10 * seed, max_tokens=30)


@pytest.mark.parametrize("met", [True, pytest.param(False, marks=pytest.mark.long)], ids=["known", "unknown"])
async def test_prefill_is_killed_after_the_ticket_and_before_the_pull(
    met: bool, folder: Path, forking: ForkingProcess
) -> None:
    """Decode waits 5 s for a worker that it does not know; `tests/transfer/test_thread.py` needs no processes."""
    async with worker_pair(folder, forking.spawn) as pair:
        if met:
            await pair.meet()
        with_ticket = await pair.ticket(request())
        await kill(pair.p)
        assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
        await pair.check_decode(failure=FailureKind.PEER_LOST if met else FailureKind.UNREACHABLE)


async def test_prefill_is_killed_during_the_pull(
    folder: Path, forking: ForkingProcess, backend: dict[str, object]
) -> None:
    async with worker_pair(folder, forking.spawn, prefill=backend, decode=backend) as pair:
        await pair.meet()
        with_ticket = await pair.ticket(request())
        stop(pair.p)
        answering = asyncio.create_task(answer(pair.d, with_ticket))
        await pair.pull_posted()
        await kill(pair.p)
        assert await answering == undisturbed(folder, with_ticket)
        await pair.check_decode(failure=FailureKind.PEER_LOST)


async def test_prefill_restarted_at_the_same_address_is_not_taken_for_the_old_one(
    folder: Path, forking: ForkingProcess
) -> None:
    port = free_port()
    async with worker_pair(folder, forking.spawn, prefill={"side_channel_port": port}) as pair:
        await pair.meet()
        old = await pair.ticket(request())
        await kill(pair.p)
        pair.p = await pair.start(Role.PREFILL, side_channel_port=port)
        assert await answer(pair.d, old) == undisturbed(folder, old)
        stats = await pair.d.stats()
        assert sum(stats.transfer_failures.values()) == 1
        new = await pair.ticket(request("new", seed=1))
        assert await answer(pair.d, new) == undisturbed(folder, new)
        assert (await pair.d.stats()).transfers == 1, "decode connects to the new engine without a restart"
        await pair.check_prefill()


async def test_a_seal_that_is_not_ascii_costs_only_its_own_group_the_transfer(
    folder: Path, forking: ForkingProcess
) -> None:
    """Such a seal used to end the engine process: one request of one client was enough."""
    keys: dict[str, object] = {"cluster_key": "secret"}
    async with worker_pair(folder, forking.spawn, prefill=keys, decode=keys) as pair:
        await pair.meet()
        with_ticket = await pair.ticket(request())
        hostile = msgspec.structs.replace(
            with_ticket, ticket=msgspec.structs.replace(ticket_of(with_ticket), seal="é" * 64)
        )
        assert await answer(pair.d, hostile) == undisturbed(folder, hostile)
        await pair.d.release(ticket_of(hostile))
        await pair.check_decode(failure=FailureKind.REFUSED)
        assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
        assert not pair.d.died.is_set()


async def test_a_ticket_serves_only_its_own_prompt_and_number_of_readers(folder: Path, forking: ForkingProcess) -> None:
    async with worker_pair(folder, forking.spawn, decode={"prefix_cache": False}) as pair:
        await pair.meet()
        with_ticket = await pair.ticket(request(n=32), readers=2)
        assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
        stats = await pair.check_decode()
        assert (stats.transfers, stats.recomputed_tokens) == (1, 1), "one transfer of the trunk"
        assert stats.transfer_bytes == 38 * pair.d.info.bytes_per_block
        for _ in range(2):
            assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
            await pair.check_prefill()  # P has received the second acknowledgement: a third reader is too late
        stats = await pair.check_decode(failure=FailureKind.LEASE_ENDED)
        assert stats.transfers == 2

        target = request("target", seed=1)
        other = ticket_of(await pair.ticket(request("other", seed=2)))
        forged = msgspec.structs.replace(other, prompt_digest=prompt_digest(target.prompt[: other.num_tokens]))
        assert await answer(pair.d, msgspec.structs.replace(target, ticket=forged)) == undisturbed(folder, target)
        stats = await until(pair.d, lambda stats: stats.pulls_open == 0)
        assert (stats.transfers, stats.transfer_failures) == (2, {FailureKind.LEASE_ENDED: 2})
        await pair.p.release(other)
        await pair.check_prefill()


@pytest.mark.parametrize("backend", ["shared-memory", pytest.param("nixl", marks=pytest.mark.long)], indirect=True)
async def test_a_late_reader_gets_neither_expired_blocks_nor_their_new_contents(
    folder: Path, forking: ForkingProcess, backend: dict[str, object]
) -> None:
    memory = gb_of(70)  # a little more than the longest prompt needs
    prefill = backend | {"lease_s": 0.2, "kv_cache_gb": memory}
    async with worker_pair(folder, forking.spawn, prefill=prefill, decode=backend) as pair:
        await pair.meet()
        expired = await pair.ticket(request("expired", length=250, seed=5))
        assert (await pair.check_prefill()).leases_expired == 1
        assert await answer(pair.d, expired) == undisturbed(folder, expired)
        await pair.check_decode(failure=FailureKind.LEASE_ENDED)

        late = [await pair.ticket(request(f"late{i}", length=250, seed=i)) for i in range(2)]
        await pair.check_prefill()
        others = [await pair.ticket(request(f"other{i}", length=250, seed=10 + i)) for i in range(2)]
        reused = {block for other in others for block in ticket_of(other).remote_block_ids}
        assert all(reused & {*ticket_of(one).remote_block_ids} for one in late)
        for one in (*others, *late):
            assert await answer(pair.d, one) == undisturbed(folder, one)
        await pair.check_prefill()


@pytest.mark.parametrize("backend", ["shared-memory", pytest.param("nixl", marks=pytest.mark.long)], indirect=True)
async def test_prefill_stops_during_a_pull_whose_client_leaves_and_continues_later(
    folder: Path, forking: ForkingProcess, backend: dict[str, object]
) -> None:
    decode = backend | {"kv_cache_gb": gb_of(80)}
    async with worker_pair(folder, forking.spawn, prefill=backend, decode=decode) as pair:
        await pair.meet()
        left = await pair.ticket(request("left"))
        stop(pair.p)
        stream = pair.d.generate(left)
        await pair.pull_posted()
        await stream.aclose()
        others = [group(f"o{i}", prompt_of(60, 20 + i), n=2, seed=i, max_tokens=80) for i in range(4)]
        answering = [asyncio.create_task(answer(pair.d, other)) for other in others]
        stats = await until(pair.d, lambda stats: stats.generated_tokens > 100)
        assert (stats.pulls_open, stats.blocks_pulling) == (1, 38), "the pull keeps its blocks"
        send(pair.p, signal.SIGCONT)
        await until(pair.d, lambda stats: stats.pulls_open == 0)
        for other, task in zip(others, answering, strict=True):
            assert await task == undisturbed(folder, other)
        await pair.check_decode()
        await pair.check_prefill()


async def test_a_pull_from_a_stopped_prefill_ends_in_time(
    folder: Path, forking: ForkingProcess, backend: dict[str, object]
) -> None:
    decode = backend | {"pull_timeout_s": 2.0}
    async with worker_pair(folder, forking.spawn, prefill=backend, decode=decode) as pair:
        await pair.meet()
        with_ticket = await pair.ticket(request())
        stop(pair.p)
        assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
        stats = await pair.d.stats(check=True)
        assert (stats.pulls_open, stats.blocks_pulling) == (1, 38)
        send(pair.p, signal.SIGCONT)
        await pair.check_decode(failure=FailureKind.TIMEOUT)
        await pair.check_prefill()


async def test_workers_of_another_cluster_kv_dtype_or_transport_refuse_each_other_with_the_reason(
    folder: Path, forking: ForkingProcess
) -> None:
    other_kv = r"dtype is float32 here and bfloat16 there|bfloat16 here and float32"
    async with worker_pair(folder, forking.spawn, prefill={"cluster_key": "one"}) as pair:
        others = await asyncio.gather(
            pair.start(Role.DECODE, cluster_key="another"),
            pair.start(Role.DECODE, cluster_key="one", dtype="bfloat16"),
            pair.start(Role.DECODE, cluster_key="one", kv_transfer_backend="shared-memory"),
        )
        other_transport = "transport is shared-memory here and nixl there"
        cases = zip((pair.d, *others), ("cluster key", "cluster key", other_kv, other_transport), strict=True)
        for number, (decode, why) in enumerate(cases):
            pair.d = decode
            with pytest.raises(EngineError, match=why):
                await pair.meet()
            with_ticket = await pair.ticket(request(f"refused {number}"))
            expected = undisturbed(folder, with_ticket, dtype=decode.info.dtype)
            assert await answer(decode, with_ticket) == expected
            await pair.check_decode(failure=FailureKind.REFUSED)
            await pair.p.release(ticket_of(with_ticket))
            await pair.check_prefill()

"""What goes wrong on the prefill side, and what a client of the group sees: its choices, as if nothing had happened."""

import asyncio
import signal
import socket
from pathlib import Path

import msgspec
import pytest

from motet.transfer.base import FailureKind, TransferError
from motet.transfer.ticket import prompt_digest
from motet.types import GenerateRequest, Role
from tests.engines.native.drive import gb_of, group, prompt_of
from tests.fault.worker_pair import answer, kill, send, stop, ticket_of, undisturbed, until, worker_pair

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def request(name: str = "g", *, length: int = 300, seed: int = 0, n: int = 4) -> GenerateRequest:
    return group(name, prompt_of(length, seed), n=n, seed=10 * seed, max_tokens=30)


async def test_without_a_fault_there_is_one_transfer_of_the_trunk(folder: Path) -> None:
    async with worker_pair(folder) as pair:
        await pair.meet()
        with_ticket = await pair.ticket(request(n=32))
        assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
        stats = await pair.check_decode()
        assert (stats.transfers, stats.recomputed_tokens) == (1, 1)
        assert stats.transfer_bytes == 38 * pair.d.info.bytes_per_block
        await pair.check_prefill()


@pytest.mark.parametrize("met", [True, False], ids=["known", "unknown"])
async def test_prefill_killed_after_the_ticket_and_before_the_pull(met: bool, folder: Path) -> None:
    async with worker_pair(folder) as pair:
        if met:
            await pair.meet()
        with_ticket = await pair.ticket(request())
        await kill(pair.p)
        assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
        await pair.check_decode(failure=FailureKind.PEER_LOST if met else FailureKind.UNREACHABLE)


@pytest.mark.usefixtures("over_tcp")
async def test_prefill_killed_during_the_pull(folder: Path) -> None:
    async with worker_pair(folder) as pair:
        await pair.meet()
        with_ticket = await pair.ticket(request())
        stop(pair.p)
        answering = asyncio.create_task(answer(pair.d, with_ticket))
        await pair.pull_posted()
        await kill(pair.p)
        assert await answering == undisturbed(folder, with_ticket)
        await pair.check_decode(failure=FailureKind.PEER_LOST)


async def test_prefill_restarted_under_the_same_address_is_not_taken_for_the_old_one(folder: Path) -> None:
    port = free_port()
    async with worker_pair(folder, prefill={"side_channel_port": port}) as pair:
        await pair.meet()
        old = await pair.ticket(request())
        await kill(pair.p)
        pair.p = await pair.start(Role.PREFILL, side_channel_port=port)
        assert await answer(pair.d, old) == undisturbed(folder, old)
        stats = await pair.d.stats()
        assert sum(stats.transfer_failures.values()) == 1
        new = await pair.ticket(request("new", seed=1))
        assert await answer(pair.d, new) == undisturbed(folder, new)
        assert (await pair.d.stats()).transfers == 1, "the new one is met without a restart of decode"
        await pair.check_prefill()


async def test_lease_expired_before_the_pull(folder: Path) -> None:
    async with worker_pair(folder, prefill={"lease_s": 0.2}) as pair:
        await pair.meet()
        with_ticket = await pair.ticket(request())
        assert (await pair.check_prefill()).leases_expired == 1
        assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
        await pair.check_decode(failure=FailureKind.LEASE_ENDED)


async def test_a_ticket_is_good_for_as_many_readers_as_it_says(folder: Path) -> None:
    async with worker_pair(folder, decode={"prefix_cache": False}) as pair:
        with_ticket = await pair.ticket(request(), readers=2)
        for _ in range(3):
            assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
        stats = await pair.check_decode(failure=FailureKind.LEASE_ENDED)
        assert stats.transfers == 2
        await pair.check_prefill()


async def test_a_ticket_that_was_altered_for_another_prompt_brings_no_kv_of_the_wrong_one(folder: Path) -> None:
    async with worker_pair(folder) as pair:
        wanted = request("wanted", seed=1)
        other = ticket_of(await pair.ticket(request("other", seed=2)))
        forged = msgspec.structs.replace(other, prompt_digest=prompt_digest(wanted.prompt[: other.num_tokens]))
        assert await answer(pair.d, msgspec.structs.replace(wanted, ticket=forged)) == undisturbed(folder, wanted)
        await pair.check_decode(failure=FailureKind.LEASE_ENDED)
        await pair.p.release(other)
        await pair.check_prefill()


async def test_blocks_given_to_others_after_expiry_never_reach_a_late_reader(folder: Path) -> None:
    memory = gb_of(70)  # a little more than one prompt of the greatest length needs
    async with worker_pair(folder, prefill={"lease_s": 0.2, "kv_cache_gb": memory}) as pair:
        await pair.meet()
        late = [await pair.ticket(request(f"late{i}", length=250, seed=i)) for i in range(2)]
        await pair.check_prefill()
        others = [await pair.ticket(request(f"other{i}", length=250, seed=10 + i)) for i in range(2)]
        reused = {block for other in others for block in ticket_of(other).remote_block_ids}
        assert all(reused & {*ticket_of(one).remote_block_ids} for one in late)
        for one in (*others, *late):
            assert await answer(pair.d, one) == undisturbed(folder, one)
        await pair.check_prefill()


@pytest.mark.usefixtures("over_tcp")
async def test_prefill_stopped_during_a_pull_whose_client_leaves_and_going_on_later(folder: Path) -> None:
    memory = gb_of(80)
    async with worker_pair(folder, decode={"kv_cache_gb": memory}) as pair:
        await pair.meet()
        left = await pair.ticket(request("left"))
        stop(pair.p)
        stream = pair.d.generate(left)
        await pair.pull_posted()
        await stream.aclose()
        others = [group(f"o{i}", prompt_of(60, 20 + i), n=2, seed=i, max_tokens=80) for i in range(4)]
        answering = [asyncio.create_task(answer(pair.d, other)) for other in others]
        stats = await until(pair.d, lambda stats: stats.generated_tokens > 100)
        assert (stats.pulls_open, stats.blocks_pulling) == (1, 38), "the blocks stay the pull's"
        send(pair.p, signal.SIGCONT)
        await until(pair.d, lambda stats: stats.pulls_open == 0)
        for other, task in zip(others, answering, strict=True):
            assert await task == undisturbed(folder, other)
        await pair.check_decode()
        await pair.check_prefill()


@pytest.mark.usefixtures("over_tcp")
async def test_a_pull_from_a_stopped_prefill_is_given_up_in_time(folder: Path) -> None:
    async with worker_pair(folder, decode={"pull_timeout_s": 0.5}) as pair:
        await pair.meet()
        with_ticket = await pair.ticket(request())
        stop(pair.p)
        assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
        stats = await pair.d.stats(check=True)
        assert (stats.pulls_open, stats.blocks_pulling) == (1, 38)
        send(pair.p, signal.SIGCONT)
        await pair.check_decode(failure=FailureKind.TIMEOUT)
        await pair.check_prefill()


async def test_side_channel_that_nobody_answers(folder: Path) -> None:
    async with worker_pair(folder) as pair:
        with_ticket = await pair.ticket(request())
        elsewhere = msgspec.structs.replace(ticket_of(with_ticket), remote_port=free_port())
        lost = msgspec.structs.replace(with_ticket, ticket=elsewhere)
        assert await answer(pair.d, lost) == undisturbed(folder, lost)
        await pair.check_decode(failure=FailureKind.UNREACHABLE)
        await pair.p.release(ticket_of(with_ticket))
        await pair.check_prefill()


async def test_workers_whose_kv_differs_refuse_each_other_and_say_why(folder: Path) -> None:
    async with worker_pair(folder, prefill={"dtype": "bfloat16"}) as pair:
        with pytest.raises(
            TransferError, match=r"dtype is float32 here and bfloat16 there|bfloat16 here and float32"
        ) as no:
            await pair.meet()
        assert no.value.kind is FailureKind.REFUSED
        with_ticket = await pair.ticket(request())
        assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
        await pair.check_decode(failure=FailureKind.REFUSED)
        await pair.p.release(ticket_of(with_ticket))
        await pair.check_prefill()


@pytest.mark.parametrize("key", ["", "another"])
async def test_workers_without_the_same_cluster_key_refuse_each_other(key: str, folder: Path) -> None:
    async with worker_pair(folder, prefill={"cluster_key": "ours"}, decode={"cluster_key": key}) as pair:
        with pytest.raises(TransferError, match="cluster key") as no:
            await pair.meet()
        assert no.value.kind is FailureKind.REFUSED
        with_ticket = await pair.ticket(request())
        assert await answer(pair.d, with_ticket) == undisturbed(folder, with_ticket)
        await pair.check_decode(failure=FailureKind.REFUSED)
        await pair.p.release(ticket_of(with_ticket))
        await pair.check_prefill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port

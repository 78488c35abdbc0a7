"""Servers on several hosts, each with its own address: KV goes from one to another over TCP, and links are cut.

A cut link carries nothing, and nobody is told: no FIN, no RST. Each answer is compared with that of one server that
does everything and was left alone.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fault.answers import Body
from tests.fault.fault_requests import TEXT
from tests.forked import ForkingProcess
from tests.hosts.network import Host
from tests.hosts.servers import PATH, Server, all_serving, eventually, serving
from tests.tiny_engine import TINY

pytestmark = [pytest.mark.slow, pytest.mark.hosts]

ENGINE = (*TINY, "--heartbeat-timeout", "60")
APART = ("--cluster-key", "ours", "--side-channel-port", "0", "--lease", "3")
ASKING = ("--bypass-tokens", "0", "--pull-timeout", "2")
TURNS = ("--worker-timeout", "2", "--routing-policy", "round-robin")
PREFILL_PORT, DECODE_PORT, WORKER_PORT, GATEWAY_PORT = 8000, 8001, 8002, 8003
N = 8
FAILURES = "motet:kv_transfer_failures_total"
GIVEN_UP_S = 80
"""Time by which a prefill host that is cut off is given up, even on a busy machine. One prefill may take 120 s."""


@dataclass(frozen=True)
class Servers:
    """Prefill on one host, decode on another. `gateway` has two `workers`, of which `alone` does everything."""

    prefill: Server
    decode: Server
    alone: Server
    worker: Server
    gateway: Server

    @property
    def workers(self) -> Sequence[Server]:
        return self.worker, self.alone


@pytest.fixture(scope="module")
def servers(network: Mapping[str, Host], folder: Path, forking: ForkingProcess) -> Iterator[Servers]:
    """After this the thread of the tests is on the client's host."""
    one, two, three = network["one"], network["two"], network["three"]
    engine = ("serve", str(folder), *ENGINE)
    prefill = (*engine, *APART, "--role", "prefill", "--side-channel-host", one.address)
    decode = (*engine, *APART, "--role", "decode", "--side-channel-host", two.address, *ASKING)
    prefill_url = f"http://{one.address}:{PREFILL_PORT}"
    workers = (f"http://{host.address}:{WORKER_PORT}" for host in (two, three))
    behind = (part for url in workers for part in ("--worker", url))
    with (
        network["client"].entered(),
        all_serving(
            serving(forking, one, PREFILL_PORT, *prefill),
            serving(forking, two, DECODE_PORT, *decode, "--prefill-url", prefill_url),
            serving(forking, three, WORKER_PORT, *engine),
            serving(forking, two, WORKER_PORT, *engine),
            serving(forking, network["four"], GATEWAY_PORT, "gateway", *behind, *TURNS),
        ) as started,
    ):
        yield Servers(*started)


def asked(name: str, **fields: object) -> Body:
    """Each name gives a prompt that no cache knows, with about 400 KB of KV."""
    return {"prompt": f"{name}: {TEXT * 12}", "n": N, "max_tokens": 40, "seed": 7, "ignore_eos": True, **fields}


def with_ticket(prefill: Server, body: Body) -> Body:
    """Prefills the prompt, and returns the body with the ticket."""
    order = {**body, "n": 1, "kv_transfer_params": {"do_remote_decode": True}}
    return {**body, "kv_transfer_params": prefill.http.post(PATH, json=order).json()["kv_transfer_params"]}


def check_transfer(servers: Servers, name: str, *, alone: bool = True) -> None:
    """Checks that a group of n takes one prefill and one transfer, whose bytes cross decode's link. `alone`: nothing
    else is under way. Data sent into a cut link comes when it is back, and may begin a prefill."""
    prefill, decode, body = servers.prefill, servers.decode, asked(name)
    expected = servers.alone.ask(body)
    decode.until(lambda status: status.worker(prefill).state == "ready")
    prefilled, fetched, received = prefill.status.totals, decode.status.totals, decode.host.bytes_received()
    assert decode.ask(body) == expected
    received = decode.host.bytes_received() - received
    prefilled, fetched = prefill.status.totals - prefilled, decode.status.totals - fetched
    assert (fetched.transfers, fetched.bypasses) == (1, 0)
    assert prefilled.prefills == 1 or (prefilled.prefills > 1 and not alone)
    assert 400_000 < fetched.transfer_bytes < received
    assert prefill.until_idle()
    assert decode.until_idle()


def check_transfers_again(servers: Servers, name: str) -> None:
    """Checks that nobody holds anything and KV moves again. The first prompt may find its connection ended."""
    prefill, decode, body = servers.prefill, servers.decode, asked(name)
    assert prefill.until_idle()
    assert decode.until_idle()
    decode.until(lambda status: status.worker(prefill).state == "ready")
    assert decode.ask(body) == servers.alone.ask(body)
    check_transfer(servers, f"{name}, and again", alone=False)


def test_kv_goes_from_host_to_host_over_tcp(servers: Servers) -> None:
    check_transfer(servers, "undisturbed")


def test_decode_computes_prompts_while_the_prefill_host_is_away_then_pulls_again(
    servers: Servers,
) -> None:
    prefill, decode = servers.prefill, servers.decode
    bodies = [asked(f"without {number}") for number in range(3)]
    expected = [servers.alone.ask(body) for body in bodies]
    assert decode.ask(bodies[0]) == expected[0]  # leaves a connection to prefill open, which is dead later
    before = decode.status.totals
    with prefill.host.cut_off():
        for body, answer in zip(bodies[1:], expected[1:], strict=True):
            begun_s = time.monotonic()
            assert decode.ask(body) == answer
            assert time.monotonic() - begun_s < GIVEN_UP_S
        assert decode.until_idle()
    passed = decode.status.totals - before
    assert (passed.transfers, passed.bypasses) == (0, 2)
    check_transfers_again(servers, "with it again")


def test_prefill_host_is_cut_off_while_it_computes_and_holds_nothing_when_it_is_back(servers: Servers) -> None:
    prefill, decode, body = servers.prefill, servers.decode, asked("computing")
    expected = servers.alone.ask(body)
    decode.until(lambda status: status.worker(prefill).state == "ready")  # else it would not ask it
    with ThreadPoolExecutor(1) as asking, stopped(prefill) as go_on:
        answer = asking.submit(decode.ask, body)
        eventually(lambda: prefill.metric("motet:groups_without_first_token"), lambda groups: groups == 1)
        with prefill.host.cut_off():
            go_on()
            assert answer.result() == expected
            assert decode.until_idle()
    check_transfers_again(servers, "computing again")


def test_prefill_host_is_cut_off_before_its_prompts_are_fetched(servers: Servers) -> None:
    """The read stays open, since its data may still arrive, and its blocks are not used until it has. Nobody waits
    behind it."""
    prefill, decode = servers.prefill, servers.decode
    bodies = [asked(f"fetched {number}") for number in range(2)]
    expected = [servers.alone.ask(body) for body in bodies]
    late = decode.metric(FAILURES, kind="timeout")
    tickets = [with_ticket(prefill, body) for body in bodies]
    with prefill.host.cut_off():
        assert [decode.ask(ticket) for ticket in tickets] == expected
        held = decode.until(lambda status: status.own.groups_running == 0).own
        assert held.pulls_open == 1
        assert held.blocks_pulling > 0
    assert decode.metric(FAILURES, kind="timeout") == late + 2
    check_transfers_again(servers, "fetched again")


def test_prefill_host_is_cut_off_while_its_prompt_is_fetched(servers: Servers) -> None:
    """The engine was asked for the data, and sends it into the cut link."""
    prefill, decode, body = servers.prefill, servers.decode, asked("fetching")
    expected = servers.alone.ask(body)
    ticket = with_ticket(prefill, body)
    with ThreadPoolExecutor(1) as asking, stopped(prefill) as go_on:
        received = prefill.host.bytes_received()
        answer = asking.submit(decode.ask, ticket)
        decode.until(lambda status: status.own.pulls_open == 1)
        eventually(prefill.host.bytes_received, lambda now: now > received + 4096)
        with prefill.host.cut_off():
            go_on()
            assert answer.result() == expected
    check_transfers_again(servers, "fetching again")


def test_a_worker_is_cut_off_in_mid_answer_and_the_answer_goes_on_elsewhere(servers: Servers) -> None:
    """Its engine stands still meanwhile, so that it is not through with its group before it hears that nobody waits.

    The link is cut for no longer than the move takes: the whole answer takes a minute on a busy machine. The gateway's
    host tells the worker of the end again and again, each time after twice the time; after 100 s it does no more."""
    gateway, body = servers.gateway, asked("gateway", prompt="the hand", max_tokens=400)
    gateway.until(lambda status: all(status.worker(worker).state == "ready" for worker in servers.workers))
    expected = servers.alone.ask(body)
    before = gateway.status.totals
    with gateway.streaming(body) as answer:
        answer.read_some(choices=N)
        (writing,) = [worker for worker in servers.workers if answer.is_from(worker.url)]
        with stopped(writing):
            with writing.host.cut_off():
                gateway.until(lambda status: status.worker(writing).state == "silent")
                gateway.until(lambda status: (status.totals - before).choices_resumed >= N)
            eventually(lambda: writing.metric("motet:groups_total", status="499"), lambda left: left >= 1)
        assert answer.read_all().choices == expected.choices
    assert (gateway.status.totals - before).choices_resumed == N
    gateway.until(lambda status: status.worker(writing).state == "ready")
    following = [asked(f"gateway {number}") for number in range(2)]
    expected_of = [servers.alone.ask(body) for body in following]
    forks = writing.until_idle().totals.forks
    assert [gateway.ask(body) for body in following] == expected_of  # the two workers take turns
    assert writing.status.totals.forks == forks + N - 1


@contextmanager
def stopped(server: Server) -> Iterator[Callable[[], None]]:
    """Stops the server's engine, until the test calls what is yielded."""
    engine = server.status.own.pid
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    try:
        yield lambda: os.kill(engine, signal.SIGCONT)
    finally:
        os.kill(engine, signal.SIGCONT)

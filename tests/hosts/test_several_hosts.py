"""Servers on several hosts, each with its own address: KV is transferred between them over TCP, and links are cut.

A cut link transmits nothing, and neither end is informed: no FIN, no RST. Each answer is compared with the answer of
one server with both roles and without faults.
"""

import os
import signal
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
APART = ("--cluster-key", "shared", "--side-channel-port", "0", "--lease", "6")
PULLING = ("--bypass-tokens", "0", "--pull-timeout", "5", "--prefill-timeout", "3600")
"""Flags of decode. A request to a prefill host that is cut off would not end before the tests' clients give up."""
TURNS = ("--worker-timeout", "5", "--routing-policy", "round-robin")
PREFILL_PORT, DECODE_PORT, WORKER_PORT, GATEWAY_PORT = 8000, 8001, 8002, 8003
N = 8
FAILURES = "motet:kv_transfer_failures_total"


@dataclass(frozen=True)
class Servers:
    """Prefill on one host, decode on another. `gateway` has two `workers`; `alone` is one of them and has both
    roles."""

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
    """Starts the servers. The thread of the tests is on the client's host then."""
    one, two, three = network["one"], network["two"], network["three"]
    engine = ("serve", str(folder), *ENGINE)
    prefill = (*engine, *APART, "--role", "prefill", "--side-channel-host", one.address)
    decode = (*engine, *APART, "--role", "decode", "--side-channel-host", two.address, *PULLING)
    prefill_url = f"http://{one.address}:{PREFILL_PORT}"
    workers = (f"http://{host.address}:{WORKER_PORT}" for host in (two, three))
    named = (part for url in workers for part in ("--worker", url))
    with (
        network["client"].entered(),
        all_serving(
            serving(forking, one, PREFILL_PORT, *prefill),
            serving(forking, two, DECODE_PORT, *decode, "--prefill-url", prefill_url),
            serving(forking, three, WORKER_PORT, *engine),
            serving(forking, two, WORKER_PORT, *engine),
            serving(forking, network["four"], GATEWAY_PORT, "gateway", *named, *TURNS),
        ) as started,
    ):
        yield Servers(*started)


def request(name: str, **fields: object) -> Body:
    """Returns a request whose prompt is in no cache, with about 400 KB of KV. `name`: different for each request."""
    return {"prompt": f"{name}: {TEXT * 12}", "n": N, "max_tokens": 40, "seed": 7, "ignore_eos": True, **fields}


def with_ticket(prefill: Server, body: Body) -> Body:
    """Prefills the prompt, and returns the body with the ticket."""
    order = {**body, "n": 1, "kv_transfer_params": {"do_remote_decode": True}}
    return {**body, "kv_transfer_params": prefill.http.post(PATH, json=order).json()["kv_transfer_params"]}


def check_transfer(servers: Servers, name: str, *, alone: bool = True) -> None:
    """Checks that a group of n takes one prefill and one transfer, whose bytes cross decode's link. `alone`: True if
    nothing else runs. Data that was sent into a cut link arrives when the link is back, and can start a prefill."""
    prefill, decode, body = servers.prefill, servers.decode, request(name)
    expected = servers.alone.complete(body)
    decode.until(lambda status: status.worker(prefill).state == "ready")
    prefilled, pulled, received = prefill.status.totals, decode.status.totals, decode.host.bytes_received()
    assert decode.complete(body) == expected
    received = decode.host.bytes_received() - received
    prefilled, pulled = prefill.status.totals - prefilled, decode.status.totals - pulled
    assert (pulled.transfers, pulled.bypasses) == (1, 0)
    assert prefilled.prefills == 1 or (prefilled.prefills > 1 and not alone)
    assert 400_000 < pulled.transfer_bytes < received
    assert prefill.until_idle()
    assert decode.until_idle()


def check_transfers_again(servers: Servers, name: str) -> None:
    """Checks that no server holds blocks and that KV is transferred again. The connection can have ended for the first
    prompt."""
    prefill, decode, body = servers.prefill, servers.decode, request(name)
    assert prefill.until_idle()
    assert decode.until_idle()
    decode.until(lambda status: status.worker(prefill).state == "ready")
    assert decode.complete(body) == servers.alone.complete(body)
    check_transfer(servers, f"{name}, and again", alone=False)


def test_kv_is_transferred_between_hosts_over_tcp(servers: Servers) -> None:
    check_transfer(servers, "undisturbed")


def test_decode_computes_prompts_without_the_prefill_host_and_pulls_again_later(servers: Servers) -> None:
    """Decode stops waiting for a prefill host that is cut off long before `--prefill-timeout`."""
    prefill, decode = servers.prefill, servers.decode
    bodies = [request(f"without {number}") for number in range(3)]
    expected = [servers.alone.complete(body) for body in bodies]
    assert decode.complete(bodies[0]) == expected[0]  # opens a connection to prefill, which is dead later
    before = decode.status.totals
    with prefill.host.cut_off():
        for body, answer in zip(bodies[1:], expected[1:], strict=True):
            assert decode.complete(body) == answer
        assert decode.until_idle()
    since = decode.status.totals - before
    assert (since.transfers, since.bypasses) == (0, 2)
    check_transfers_again(servers, "with it again")


def test_a_prefill_host_cut_off_while_it_computes_holds_nothing_afterwards(servers: Servers) -> None:
    prefill, decode, body = servers.prefill, servers.decode, request("computing")
    expected = servers.alone.complete(body)
    decode.until(lambda status: status.worker(prefill).state == "ready")  # else it would not use prefill
    with ThreadPoolExecutor(1) as pool, stopped(prefill) as resume:
        answer = pool.submit(decode.complete, body)
        eventually(lambda: prefill.metric("motet:groups_without_first_token"), lambda groups: groups == 1)
        with prefill.host.cut_off():
            resume()
            assert answer.result() == expected
            assert decode.until_idle()
    check_transfers_again(servers, "computing again")


@pytest.mark.long
def test_a_prefill_host_is_cut_off_before_its_prompts_are_pulled(servers: Servers) -> None:
    """The pull stays open, since its data can still arrive, and its blocks are not used until then. No group waits for
    it."""
    prefill, decode = servers.prefill, servers.decode
    bodies = [request(f"pulled {number}") for number in range(2)]
    expected = [servers.alone.complete(body) for body in bodies]
    late = decode.metric(FAILURES, kind="timeout")
    tickets = [with_ticket(prefill, body) for body in bodies]
    with prefill.host.cut_off():
        assert [decode.complete(ticket) for ticket in tickets] == expected
        held = decode.until(lambda status: status.own.groups_running == 0).own
        assert held.pulls_open == 1
        assert held.blocks_pulling > 0
    assert decode.metric(FAILURES, kind="timeout") == late + 2
    check_transfers_again(servers, "pulled again")


@pytest.mark.long
def test_a_prefill_host_is_cut_off_while_its_prompt_is_pulled(servers: Servers) -> None:
    """The engine has received the request for the data, and sends it into the cut link."""
    prefill, decode, body = servers.prefill, servers.decode, request("pulling")
    expected = servers.alone.complete(body)
    ticket = with_ticket(prefill, body)
    with ThreadPoolExecutor(1) as pool, stopped(prefill) as resume:
        received = prefill.host.bytes_received()
        answer = pool.submit(decode.complete, ticket)
        decode.until(lambda status: status.own.pulls_open == 1)
        eventually(prefill.host.bytes_received, lambda now: now > received + 4096)
        with prefill.host.cut_off():
            resume()
            assert answer.result() == expected
    check_transfers_again(servers, "pulling again")


def test_a_worker_is_cut_off_during_an_answer_and_another_one_continues_it(servers: Servers) -> None:
    """The engine is stopped during this time, so that its group does not finish before the worker learns that the
    gateway has closed the connection.

    The link is cut only for the duration of the move: the complete answer takes a minute on a busy machine. The
    gateway's host repeats the end of the connection to the worker, each time after twice the time, and stops after 100
    s."""
    gateway, body = servers.gateway, request("gateway", prompt="the hand", max_tokens=400)
    gateway.until(lambda status: all(status.worker(worker).state == "ready" for worker in servers.workers))
    expected = servers.alone.complete(body)
    before = gateway.status.totals
    with gateway.streaming(body) as answer:
        answer.read_some(choices=N)
        (generating,) = [worker for worker in servers.workers if answer.is_from(worker.url)]
        with stopped(generating):
            with generating.host.cut_off():
                gateway.until(lambda status: status.worker(generating).state == "silent")
                gateway.until(lambda status: (status.totals - before).choices_resumed >= N)
            eventually(lambda: generating.metric("motet:groups_total", status="499"), lambda left: left >= 1)
        assert answer.read_all().choices == expected.choices
    assert (gateway.status.totals - before).choices_resumed == N
    gateway.until(lambda status: status.worker(generating).state == "ready")
    following = [request(f"gateway {number}") for number in range(2)]
    expected_of = [servers.alone.complete(body) for body in following]
    forks = generating.until_idle().totals.forks
    assert [gateway.complete(body) for body in following] == expected_of  # the two workers alternate
    assert generating.status.totals.forks == forks + N - 1


@contextmanager
def stopped(server: Server) -> Iterator[Callable[[], None]]:
    """Stops the server's engine, until the test calls the yielded function."""
    engine = server.status.own.pid
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    try:
        yield lambda: os.kill(engine, signal.SIGCONT)
    finally:
        os.kill(engine, signal.SIGCONT)

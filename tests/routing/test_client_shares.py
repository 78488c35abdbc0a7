"""What a client gets of full workers does not depend on what other clients send."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engine import Worker
from motet.engine_info import EngineKind
from motet.ids import RequestId
from motet.routing.choosing.choose import choose
from motet.routing.choosing.cost import can_start, can_start_in_share, can_start_partially
from motet.routing.choosing.survey import survey, trunk_of
from motet.routing.queue.capacity import ClientCapacity, have_capacity
from motet.routing.queue.fair_queue import MAX_DELAY_S, PATIENCE_S, ClientRules, FairQueue
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Member
from motet.routing.workers.open_groups import OpenGroup
from motet.routing.workers.serving import WorkKind
from motet.routing.workers.worker_share import WaitingWeights, WorkerShare
from motet.settings.server_config import Policy
from motet.testing.fake_engine import FakeEngine, fake_info
from motet.types import GenerateRequest
from tests.clock import Clock
from tests.property_settings import examples
from tests.routing.scene import group, script

ROWS = 16
BLOCKS = 120
LONGEST_S = 8.0
FOREVER_S = 1e9


@dataclass(frozen=True)
class Sent:
    """A group that a client sends, and the time that its choices take."""

    request: GenerateRequest = field(hash=False, compare=False)
    number: int
    at_s: float
    takes_s: float

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def choices(self) -> int:
        return len(self.request.choices)


class Cell:
    """Workers and the queue before them. Choices run for the time that their group takes, as in an engine that gives
    every client its share at once."""

    def __init__(self, workers: int = 1, *, kind: EngineKind = EngineKind.MOTET) -> None:
        self.clock = Clock(0.0)
        self.fleet = Fleet(clock=self.clock)
        info = msgspec.structs.replace(fake_info(), max_num_seqs=ROWS, num_blocks=BLOCKS, kind=kind)
        for number in range(workers):
            self.fleet.put(Worker(f"both-{number}", FakeEngine(script, info=info), "127.0.0.1:1"))
        self.queue: FairQueue[Sent] = FairQueue(max_wait_s=FOREVER_S)
        self.fleet.waiting_weights = self.queue.weights
        self.running: list[tuple[float, Sent, OpenGroup]] = []
        self.started_s: dict[Sent, float] = {}
        self.sent = 0
        self._rounds = 0

    def send(
        self, client: str, choices: int, *, prompt_blocks: int = 1, takes_s: float = FOREVER_S, weight: float = 1.0
    ) -> Sent:
        self.sent += 1
        request = group(f"{client}/{self.sent}", n=choices, prompt_tokens=16 * prompt_blocks)
        request = msgspec.structs.replace(
            request, client=client, client_weight=weight, request_id=RequestId(str(self.sent))
        )
        sent = Sent(request, self.sent, self.clock.now_s, takes_s)
        self.queue.push(sent, choices=choices, priority=0, now_s=sent.at_s, client=client, weight=weight)
        return sent

    def admit(self) -> list[Sent]:
        """Starts what may start now. Returns it in order."""
        members = self.fleet.catalog.ready()
        capacity = ClientCapacity(members, WaitingWeights(self.queue.weights), round_number=self._rounds)
        self._rounds += 1
        rules = ClientRules[Sent](
            held=self._held,
            in_share=lambda sent: capacity.in_share(sent.request, sent.choices, prefilling=0),
            fits_partially=lambda sent: capacity.fits_partially(sent.request, sent.choices),
        )
        started = []
        while (sent := self.queue.pop(self._fits, self.clock.now_s, clients=rules)) is not None:
            self._start(sent)
            started.append(sent)
        return started

    def pass_time(self, seconds: float = 0.0) -> list[Sent]:
        self.clock.now_s += seconds
        for end_s, sent, opened in [*self.running]:
            if end_s <= self.clock.now_s:
                opened.close()
                self.running.remove((end_s, sent, opened))
        return self.admit()

    def open_choices(self, client: str) -> int:
        return sum(sent.choices for _, sent, _ in self.running if sent.client == client)

    def _fits(self, sent: Sent) -> bool:
        members, tokens = self.fleet.catalog.ready(), len(sent.request.prompt)
        return have_capacity(
            members, choices=sent.choices, largest_part=sent.choices, prompt_tokens=tokens, choices_prefilling=0
        )

    def _held(self, client: str, weight: float) -> float:
        total = self.fleet.client_totals.get(client)
        return total.choices / weight if total else 0.0

    def _start(self, sent: Sent) -> None:
        surveyed = survey(self.fleet, WorkKind.GENERATE, request=sent.request)
        assert surveyed is not None
        decision = choose(surveyed.candidates, surveyed.needs, policy=Policy.KV, turn=0)
        assert decision is not None
        member = surveyed.compared[decision.index][0]
        assert may_start(member, sent, self.fleet), "the engine starts a group at once"
        opened = OpenGroup(
            member.load,
            member.groups,
            choices=sent.choices,
            end=nothing,
            client=sent.client,
            weight=sent.request.client_weight,
            trunk=trunk_of(sent.request, self.fleet, member=member),
        )
        opened.add_tail_blocks(sent.choices)
        self.running.append((self.clock.now_s + sent.takes_s, sent, opened))
        self.started_s[sent] = self.clock.now_s


async def nothing(_: object) -> None: ...


def may_start(member: Member, sent: Sent, fleet: Fleet) -> bool:
    """Returns True if the worker has capacity for the group, or for a part of it, or the client is in its share."""
    load, choices = member.load, sent.choices
    held, blocks = load.trunk_blocks + load.tail_blocks, -(-len(sent.request.prompt) // 16)
    client = WaitingWeights(fleet.waiting_weights).share_of(sent.client, sent.request.client_weight, member=member)
    room = {"max_choices": ROWS, "num_blocks": BLOCKS, "choices": choices, "prompt_blocks": blocks}
    return (
        not load.open_choices
        or can_start(open_choices=load.open_choices, held_blocks=held, **room)
        or can_start_partially(client, open_choices=load.open_choices, held_blocks=held, **room)
        or can_start_in_share(client, **room)
    )


def test_a_wide_group_next_to_a_stream_of_its_client_blocks_no_other_client() -> None:
    """One stream, and groups as wide as the worker again and again, used to delay other clients by half a minute."""
    cell = Cell()
    cell.send("alpha", 1)
    wide = [cell.send("alpha", ROWS, takes_s=5.0) for _ in range(4)]
    for _ in range(60):
        cell.pass_time(0.5)
        tiny = cell.send("beta", 1, takes_s=0.3)
        assert cell.admit() == [tiny]
    waits_s = [cell.started_s[one] for one in wide]
    assert waits_s == [1.5, 6.5, 11.5, 16.5], "each starts partially when the one before has ended"


def test_many_prompts_of_one_client_do_not_delay_another() -> None:
    cell = Cell()
    for _ in range(250):
        cell.send("alpha", 1, prompt_blocks=20)
    assert len(cell.admit()) == 5
    for _ in range(3):
        tiny = cell.send("beta", 2, prompt_blocks=3)
        assert cell.admit() == [tiny]


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_client_gets_its_share_of_workers_that_are_full_of_another_ones_long_answers(weight: float) -> None:
    cell = Cell(2)
    for _ in range(3 * ROWS):
        cell.send("alpha", 1)
    cell.pass_time(100.0)
    assert cell.open_choices("alpha") == 2 * ROWS
    for _ in range(3 * ROWS):
        cell.send("beta", 1, weight=weight)
    cell.admit()
    assert cell.open_choices("beta") == 2 * ROWS * weight / (1 + weight)


def test_the_client_that_holds_the_least_is_next_and_a_client_that_holds_more_waits() -> None:
    cell = Cell()
    first = [cell.send("alpha", 1, takes_s=1.0) for _ in range(ROWS)]
    assert cell.admit() == first
    cell.pass_time(0.5)
    more = [cell.send("alpha", 4), cell.send("beta", 8), cell.send("beta", 8)]
    assert cell.admit() == [more[1]], "within its share"
    assert cell.pass_time(0.5) == [more[0]], "alpha holds nothing by now, and beta the half"


def test_a_group_above_its_clients_share_gets_blocks_before_other_clients_above_theirs() -> None:
    """The other client's groups, which need fewer blocks, used to be able to take all blocks that became free."""
    cell = Cell()
    for number in range(15):
        cell.send("beta", 1, prompt_blocks=7, takes_s=1.0 + number)
    cell.pass_time()
    assert cell.open_choices("beta") == 15, "all blocks"
    large = cell.send("alpha", 1, prompt_blocks=60)
    for _ in range(12):
        cell.send("beta", 1, prompt_blocks=7, takes_s=20.0)
        cell.pass_time(1.0)
    assert cell.started_s[large] <= 10.0, "when the other client is within its half"


def test_an_engine_that_does_not_divide_itself_fairly_gets_no_group_wider_than_a_share() -> None:
    cell = Cell(kind=EngineKind.VLLM)
    stream = cell.send("alpha", 1)
    assert cell.admit() == [stream]
    wide = cell.send("alpha", ROWS)
    cell.admit()
    assert cell.pass_time(PATIENCE_S) == [wide], "partially, since there is no other client"
    tiny, half = cell.send("beta", 1, takes_s=1.0), cell.send("gamma", ROWS // 2)
    assert cell.admit() == [tiny], "half of the worker is more than a third"
    assert cell.pass_time(0.9) == []
    assert cell.pass_time(0.1) == [half], "there are two clients now"


@pytest.mark.parametrize(
    ("client", "choices", "prompt_blocks", "expected"),
    [
        (WorkerShare(0, 0, 0.5, fair=False), 8, 2, True),
        (WorkerShare(0, 0, 0.5, fair=False), 9, 2, False),
        (WorkerShare(0, 0, 0.5, fair=True), 9, 2, True),
        (WorkerShare(1, 0, 0.5, fair=True), 8, 2, False),
        (WorkerShare(1, 50, 0.5, fair=True), 1, 9, True),
        (WorkerShare(0, 50, 0.5, fair=True), 1, 10, False),
    ],
)
def test_a_share_is_of_choices_and_of_blocks(
    client: WorkerShare, choices: int, prompt_blocks: int, expected: bool
) -> None:
    assert expected is can_start_in_share(
        client, max_choices=ROWS, num_blocks=BLOCKS, choices=choices, prompt_blocks=prompt_blocks
    )


def share_of(client: str, cell: Cell, *, weight: float = 1.0) -> float:
    (member,) = cell.fleet.members
    return WaitingWeights(cell.fleet.waiting_weights).share_of(client, weight, member=member).part


def test_a_share_counts_clients_that_run_or_wait_once_each_and_other_servers_as_one() -> None:
    cell = Cell()
    assert share_of("alpha", cell) == 1.0
    cell.send("alpha", 1, weight=2.0)
    cell.admit()
    assert share_of("alpha", cell, weight=2.0) == 1.0
    assert share_of("beta", cell) == pytest.approx(1 / 3)
    for client in ("alpha", "gamma"):
        cell.send(client, 1, weight=2.0)
    assert share_of("alpha", cell, weight=2.0) == pytest.approx(2 / 4)
    assert share_of("beta", cell) == pytest.approx(1 / 5)
    cell.fleet.members[0].load.record_report(7)
    assert share_of("beta", cell) == pytest.approx(1 / 6)


def test_a_client_holds_a_block_once_and_nothing_after_its_last_group() -> None:
    cell = Cell()
    (member,) = cell.fleet.members
    one = cell.send("alpha", 2, prompt_blocks=3, takes_s=1.0)
    again = replace(one, number=99, takes_s=2.0)
    cell.queue.push(again, choices=2, priority=0, now_s=0.0, client="alpha")
    cell.admit()
    held = member.load.clients["alpha"]
    assert (held.groups, held.choices, held.blocks) == (2, 4, 3 + 4)
    cell.pass_time(1.0)
    assert (held.groups, held.choices, held.blocks) == (1, 2, 3 + 2)
    assert cell.fleet.client_totals["alpha"].blocks == 3 + 2
    cell.pass_time(1.0)
    cell.fleet.check()


GROUPS = st.lists(
    st.tuples(st.integers(0, 19), st.integers(0, 3), st.integers(1, ROWS), st.integers(1, 60), st.booleans()),
    max_size=60,
)


@pytest.mark.slow
@examples(60)
@given(arrivals=GROUPS, workers=st.integers(1, 3), choices=st.integers(1, 3), victim_blocks=st.integers(1, 10))
def test_small_groups_start_at_once_whatever_other_clients_send(
    arrivals: Sequence[tuple[int, int, int, int, bool]], workers: int, choices: int, victim_blocks: int
) -> None:
    """Up to four other clients send any groups, which run for ever or for a while. The victim's share is a fifth."""
    cell = Cell(workers)
    for second in range(20):
        for _, client, n, blocks, ends in [one for one in arrivals if one[0] == second]:
            cell.send(f"other{client}", n, prompt_blocks=blocks, takes_s=LONGEST_S if ends else FOREVER_S)
        cell.pass_time()
        small = cell.send("victim", choices, prompt_blocks=victim_blocks, takes_s=0.9)
        assert small in cell.admit()
        cell.pass_time(1.0)


@pytest.mark.parametrize("seed", range(4))
def test_no_group_within_its_clients_share_starves(seed: int) -> None:
    """Four clients always have groups that wait, small and large. Each is in its share after at most `LONGEST_S`, when
    its open choices have ended."""
    random, cell, ticks_per_s = Random(seed), Cell(1 + seed % 2), 2
    names, waiting_of = ["a", "b", "c", "d"], 3
    limit_s = MAX_DELAY_S + PATIENCE_S + (waiting_of + 1) * LONGEST_S
    sent: list[Sent] = []
    for _ in range(90 * ticks_per_s):
        for name in names:
            waiting = [one for one in sent if one.client == name and one not in cell.started_s]
            for _ in range(waiting_of - len(waiting)):
                wide = name == "d" or random.random() < 0.2
                n, blocks = (random.randint(8, ROWS), random.randint(1, 14)) if wide else (1, random.randint(1, 14))
                sent.append(cell.send(name, n, prompt_blocks=blocks, takes_s=random.uniform(0.5, LONGEST_S)))
        cell.pass_time(1 / ticks_per_s)
        for one in sent:
            if one not in cell.started_s:
                assert cell.clock.now_s - one.at_s <= limit_s
        sent = [one for one in sent if one not in cell.started_s]
    assert len(cell.started_s) > 100

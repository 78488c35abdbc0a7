"""The loop of an engine process, run in a thread: an order that raises costs one group, a step that raises ends it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import zmq

from motet.engine_orders import Connect, EngineFacts, EngineFigures, EngineOrder, ReadStats, UnloadAdapter
from motet.engines.native.adapters.adapter_loader import AdapterThreads
from motet.engines.native.process import EngineLoop, HeartbeatThread
from motet.engines.native.protocol import (
    Close,
    Command,
    Event,
    Launch,
    NumberedAnswer,
    NumberedOrder,
    Ready,
    Release,
    StepReport,
    Submit,
)
from motet.engines.native.sleep import Sleeper
from motet.engines.native.step.handover import NO_TRANSFERS
from motet.engines.native.weight_loader import WeightThreads
from motet.engines.wire import CarriedError
from motet.errors import EngineError, ModelGoneError
from motet.ids import ModelName, RequestId
from motet.metrics.stats import EngineStats
from motet.settings.engine_config import EngineConfig
from motet.transfer.ticket import Ticket, TransferAddress
from tests.engines.native.adapter_files import load_order, save_adapter
from tests.engines.native.drive import group, prompt_of
from tests.engines.native.grammars import PERSON
from tests.engines.native.pair import CorePair, alone, with_ticket
from tests.engines.native.test_compiling import HeldGrammars
from tests.patience import PATIENCE_S

NOT_LAUNCHED = Launch(EngineConfig(model_path="", model_name=""), folder="")

Tiny = Callable[[str], Path]


class Wired:
    """The API process's side of a loop over the decode core of a pair."""

    def __init__(self, pair: CorePair, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.pair = pair
        self.crash: Exception | None = None
        self._context = context
        self._commands, self._events = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._commands.bind("inproc://commands")
        self._events.bind("inproc://events")
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert isinstance(self.next_event(), Ready)

    def send(self, *commands: Command) -> None:
        for command in commands:
            self._commands.send(msgspec.msgpack.encode(command))

    def next_event(self) -> Event:
        assert self._events.poll(int(1000 * PATIENCE_S)), "no event"
        return self._decoder.decode(self._events.recv())

    def stats(self) -> EngineStats:
        """Returns the figures in the next event."""
        event = self.next_event()
        assert isinstance(event, NumberedAnswer) and isinstance(event.answer, EngineFigures)
        return event.answer.stats

    def tokens_of(self, name: str) -> list[int]:
        """Returns the tokens of choice 0 of a group."""
        tokens: list[int] = []
        while True:
            event = self.next_event()
            assert isinstance(event, StepReport)
            for choice in (choice for delta in event.deltas if delta.request_id == name for choice in delta.choices):
                tokens += choice.token_ids
                if choice.finish:
                    return tokens

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        if self._thread.is_alive():  # otherwise the message has no receiver, and the socket would wait
            self.send(Close())
        self.join()
        self._commands.close(linger=0)
        self._events.close(linger=0)

    def _run(self) -> None:
        with self._context.socket(zmq.PULL) as commands, self._context.socket(zmq.PUSH) as events:
            commands.connect("inproc://commands")
            events.connect("inproc://events")
            parts = self.pair.parts["D"]
            sleeper = Sleeper(self.pair.d, storage=parts.storage, weights=parts.weights)
            heartbeat = HeartbeatThread(self._context, NOT_LAUNCHED, every_s=60.0)  # not entered: it sends none
            try:
                EngineLoop(
                    self.pair.d,
                    heartbeat,
                    weights=WeightThreads(parts.weights),
                    adapters=AdapterThreads(parts.adapters),
                    sleeper=sleeper,
                    commands=commands,
                    events=events,
                ).run()
            except Exception as error:
                self.crash = error


@contextmanager
def wired(pair: CorePair) -> Iterator[Wired]:
    with zmq.Context() as context:
        made = Wired(pair, context)
        try:
            yield made
        finally:
            made.close()


def raising(_: Ticket) -> NoReturn:
    """Raises an error instead of checking a ticket."""
    raise ZeroDivisionError("a bug")


@pytest.mark.slow
def test_an_order_that_raises_ends_its_group_and_the_next_group_runs(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = CorePair(tiny("llama"))
    bad = group("bad", prompt_of(100))
    ticket = pair.prefill(bad)
    monkeypatch.setattr(pair.d_transfers.key, "accepts", raising)
    with wired(pair) as engine:
        engine.send(Submit(with_ticket(bad, ticket)))
        refused = engine.next_event()
        assert isinstance(refused, StepReport)
        error = refused.failures[bad.request_id].error()
        assert type(error) is EngineError and "a bug" in error.message
        engine.send(Release(ticket), NumberedOrder(1, ReadStats(check=True)))
        stats = engine.stats()
        assert (stats.groups_waiting, stats.groups_running, stats.blocks_used) == (0, 0, 0)
        good = group("good", prompt_of(30))
        engine.send(Submit(good))
        assert engine.tokens_of("good") == alone(tiny("llama"), good)["good"][0]
    assert engine.crash is None
    assert len([record for record in caplog.records if record.exc_info]) == 2, "the submit and the release"


def test_an_engine_without_transfers_answers_that_it_cannot_connect(tiny: Tiny) -> None:
    pair = CorePair(tiny("llama"))
    pair.d.transfers = None
    with wired(pair) as engine:
        engine.send(NumberedOrder(7, Connect(TransferAddress("someone", "127.0.0.1", 1))))
        assert engine.next_event() == NumberedAnswer(7, None, CarriedError.of(EngineError(NO_TRANSFERS)))


@pytest.mark.slow
def test_orders_load_and_unload_adapters_while_groups_run(tiny: Tiny, tmp_path: Path) -> None:
    pair = CorePair(tiny("llama"), max_adapters=1)
    adapter = save_adapter(tiny("llama"), tmp_path / "a")
    long = group("long", prompt_of(30), max_tokens=200)
    with wired(pair) as engine:
        facts: list[tuple[str, ...] | str] = []

        def order(order: EngineOrder) -> None:
            """Sends an order, and notes the names of the adapters in the answer, or the code of the error."""
            engine.send(NumberedOrder(len(facts), order))
            while not isinstance(event := engine.next_event(), NumberedAnswer):
                pass
            assert event.number == len(facts)
            if event.error is not None:
                facts.append(event.error.code or "")
            else:
                assert isinstance(event.answer, EngineFacts)
                facts.append(tuple(one.name for one in event.answer.info.adapters))

        engine.send(Submit(long))
        order(load_order("broken", tmp_path))
        order(load_order("a", adapter))
        order(load_order("b", adapter))
        order(load_order("a", adapter))
        order(load_order("a", adapter, in_place=True))
        order(UnloadAdapter(ModelName("a")))
        order(UnloadAdapter(ModelName("a")))
        assert facts == [
            "invalid_adapter",
            ("a",),
            "too_many_adapters",
            "adapter_exists",
            ("a",),
            (),
            "model_not_found",
        ]
        engine.send(Submit(msgspec.structs.replace(group("gone", prompt_of(9)), model=ModelName("a"))))
        failures: dict[RequestId, CarriedError] = {}
        while not failures:
            event = engine.next_event()
            failures = event.failures if isinstance(event, StepReport) else {}
        assert isinstance(failures[RequestId("gone")].error(), ModelGoneError)
    assert engine.crash is None


@pytest.mark.slow
def test_a_step_that_raises_ends_the_loop(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = CorePair(tiny("llama"))

    def broken() -> NoReturn:
        raise ZeroDivisionError("in a step")

    monkeypatch.setattr(pair.d, "step", broken)
    with wired(pair) as engine:
        engine.send(Submit(group("g", prompt_of(30))))
        engine.join()
    assert isinstance(engine.crash, ZeroDivisionError)


@pytest.mark.slow
def test_the_loop_ends_while_a_grammar_compiles_in_a_daemon_thread(tiny: Tiny) -> None:
    grammars = HeldGrammars()
    pair = CorePair(tiny("llama"), grammars=grammars)
    try:
        with wired(pair) as engine:
            engine.send(Submit(group("g", prompt_of(20), grammar=PERSON)), NumberedOrder(1, ReadStats()))
            assert engine.stats().groups_waiting == 1
        assert engine.crash is None
        compiling = [thread for thread in threading.enumerate() if thread.name.startswith("grammar-")]
        assert compiling and all(thread.daemon for thread in compiling)
    finally:
        grammars.allowed.release(100)

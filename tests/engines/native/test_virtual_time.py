"""Work counters of clients after loads of different sizes, and after idle time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.native.paper import PaperEngine, answer, request
from tests.engines.native.test_shares import SMALL, slow, steps_to_first_token
from tests.property_settings import examples


def sequential(engine: PaperEngine, client: str, *, count: int) -> None:
    """Serves groups of one client, one after the other."""
    for number in range(count):
        start = 100 * number
        engine.serve(request(f"{client}{number}", range(start, start + 60), max_tokens=20, client=client))


def tokens_of(engine: PaperEngine, name: str) -> int:
    return len(engine.groups[name].sequences[0].output_tokens)


@pytest.mark.slow
def test_a_client_that_arrives_in_a_pause_of_another_does_not_take_all_time_afterwards() -> None:
    engine = slow(PaperEngine(blocks=600, max_num_seqs=16), 4)
    sequential(engine, "old", count=20)
    engine.submit(request("wide", SMALL, n=16, max_tokens=200, client="new"))
    engine.step()
    engine.submit(request("small", (60, 61), max_tokens=20, client="old"))
    assert steps_to_first_token(engine, "small") == 1
    engine.steps(10)
    assert tokens_of(engine, "small") == 11


@pytest.mark.slow
@pytest.mark.parametrize("urgent", [False, True])
def test_a_client_with_a_small_load_gets_no_credit(urgent: bool) -> None:
    """It can have a prompt that is less urgent than the other client's work, and is delayed by it."""
    engine = slow(PaperEngine(blocks=3000, max_num_seqs=16), 4)
    priority = -1 if urgent else 0
    engine.submit(request("stream", SMALL, max_tokens=2000, client="light", priority=priority))
    engine.submit(request("work", (60, 61), n=7, max_tokens=1000, client="busy", priority=priority))
    if urgent:
        engine.submit(request("late", range(7000, 7600), max_tokens=1, client="light", priority=5))
    engine.steps(150)
    if "late" in engine.groups:
        engine.abort("late")
    for number in range(100):
        start = 100 * number
        engine.submit(
            request(f"burst{number}", range(start, start + 60), max_tokens=2, client="light", priority=priority)
        )
    engine.step()
    engine.submit(request("small", (62, 63), max_tokens=4, client="busy", priority=priority))
    before = tokens_of(engine, "work")
    assert steps_to_first_token(engine, "small") <= 8
    engine.steps(30)
    assert tokens_of(engine, "work") >= before + 5


def test_a_group_that_does_not_fit_gives_no_credit_and_starts_first_when_it_fits() -> None:
    engine = slow(PaperEngine(blocks=60, max_num_seqs=16), 4)
    engine.submit(request("stream", SMALL, max_tokens=120, client="light"))
    for number in range(2):
        start = 60 + 10 * number
        engine.submit(request(f"work{number}", (start, start + 1), n=8, max_tokens=12, client="busy"))
    engine.steps(2)
    engine.submit(request("large", range(100, 260), max_tokens=1, client="light"))  # 40 + 1 of 30 blocks
    engine.steps(20)
    light, busy = (engine.scheduler.clients.use_of(engine.groups[name]) for name in ("large", "work0"))
    assert busy.work_counter - light.work_counter < 100
    engine.run_to_end()
    assert engine.outputs["large", 0] == answer(tuple(range(100, 260)), 0, 1)


@pytest.mark.slow
@examples(40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 60), st.integers(1, 8), st.integers(1, 60), st.integers(0, 40)
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([1.0, 4.0, 10.0]),
    st.booleans(),
)
def test_each_small_group_of_a_client_with_a_small_load_starts_soon(
    others: list[tuple[str, int, int, int, int]], unit_ms: float, has_stream: bool
) -> None:
    """`others`: client, prompt tokens, choices, tokens, and steps before the next group."""
    engine = slow(PaperEngine(blocks=120, budget=16, max_num_seqs=8), unit_ms)
    if has_stream:
        engine.submit(request("stream", SMALL, max_tokens=60, client="small"))
    for number, (client, length, n, tokens, num_steps) in enumerate(others):
        start = 100 * number
        engine.submit(request(f"g{number}", range(start, start + length), n=n, max_tokens=tokens, client=client))
        for _ in range(num_steps):
            if engine.groups:
                engine.step()
        name = f"small{number}"
        engine.submit(request(name, (9000 + number, 9001), max_tokens=1, client="small"))
        num_clients = len({other.request.client for other in engine.groups.values()} | {"small"})
        assert steps_to_first_token(engine, name) <= num_clients + 2  # a step has four prompt tokens of one client
    engine.run_to_end(max_steps=5000)


@pytest.mark.slow
def test_a_group_does_not_wait_long_for_a_prompt_of_another_client_that_has_other_prompts_first() -> None:
    engine = slow(PaperEngine(blocks=2000, budget=64, max_num_seqs=16), 4)
    long = tuple(range(400))
    engine.submit(request("stream", SMALL, max_tokens=400, client="third"))
    engine.submit(request("long", long, max_tokens=1, client="busy"))
    engine.steps(4)
    assert engine.groups["long"].trunk.num_computed < 100
    for number in range(60):
        start = 1000 + 100 * number
        engine.submit(request(f"short{number}", range(start, start + 20), max_tokens=1, client="busy"))
    prompt = (*long[:100], 900)
    waiting = engine.submit(request("small", prompt, max_tokens=2, client="other"))
    assert steps_to_first_token(engine, "small", most=30)
    assert not waiting.trunk.may_follow
    engine.run_to_end()
    engine.assert_outputs("small", prompt, n=1, tokens=2)
    engine.assert_outputs("long", long, n=1, tokens=1)


def test_clients_with_one_prompt_compute_it_once_while_they_contend() -> None:
    engine = slow(PaperEngine(blocks=2000, budget=64, max_num_seqs=16), 4)
    prompt = tuple(range(400))
    engine.submit(request("busy", SMALL, n=8, max_tokens=200, client="busy"))
    engine.steps(2)
    groups = [engine.submit(request(client, prompt, max_tokens=2, client=client)) for client in "abcdef"]
    num_computed = 0
    while len(engine.groups) > 1:
        num_computed += sum(chunk.end - chunk.begin for chunk in engine.step().trunks)
    assert num_computed == 400 + 5 * 4  # the last block of the prompt
    assert all(group.trunk.may_follow for group in groups)

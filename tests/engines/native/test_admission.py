"""When a group gets in, with literal block ids; blocks hold four tokens."""

from tests.engines.native.paper import PaperEngine, request, states, tables

PROMPT = tuple(range(10))


def test_a_group_is_not_admitted_when_the_budget_is_spent() -> None:
    engine = PaperEngine(blocks=40, budget=8)
    engine.submit(request("a", PROMPT))
    late = engine.submit(request("b", [50]))
    engine.step()
    assert tables(late) == ([], [[]])
    engine.step()
    assert late in engine.scheduler.running


def test_a_group_is_admitted_with_all_its_choices_or_not_at_all() -> None:
    engine = PaperEngine(blocks=8)
    small = engine.submit(request("a", PROMPT, n=2))  # 3 + 2 blocks, 3 are left
    large = engine.submit(request("b", range(50, 54), n=3))  # 1 + 3
    engine.step()
    assert list(engine.scheduler.running) == [small]
    assert tables(large) == ([], [[], [], []])
    assert states(large) == ["waiting"] * 3
    engine.abort("a")
    engine.step()
    assert list(engine.scheduler.running) == [large]
    assert states(large) == ["running"] * 3


def test_choices_that_run_at_once_are_limited_over_all_groups() -> None:
    engine = PaperEngine(blocks=40, max_num_seqs=4)
    first = engine.submit(request("a", PROMPT, n=3))
    second = engine.submit(request("b", PROMPT, n=2))
    engine.step()
    assert list(engine.scheduler.running) == [first]
    engine.stop("a", 0)
    engine.step()
    assert list(engine.scheduler.running) == [first, second]


def test_a_large_group_is_not_overtaken_by_a_small_one_behind_it() -> None:
    engine = PaperEngine(blocks=8)
    engine.submit(request("a", PROMPT))  # 4 blocks, 4 are left
    engine.submit(request("b", PROMPT[::-1], n=3))  # needs 6
    engine.submit(request("c", [1]))  # needs 2
    engine.step()
    assert [group.request.request_id for group in engine.scheduler.waiting] == ["b", "c"]


def test_a_group_that_found_no_room_is_admitted_once_it_has_fewer_choices() -> None:
    engine = PaperEngine(blocks=8)
    engine.submit(request("a", PROMPT))  # 4 blocks, 4 are left
    late = engine.submit(request("b", PROMPT[::-1], n=2))  # needs 5
    engine.step()
    engine.step()
    assert late in engine.scheduler.waiting
    engine.stop("b", 1)
    engine.step()
    assert late in engine.scheduler.running


def test_a_group_that_found_no_room_is_admitted_once_its_prefix_is_known() -> None:
    engine = PaperEngine(blocks=6)
    engine.submit(request("a", PROMPT[:8]))  # 3 blocks, 3 are left
    late = engine.submit(request("b", (*PROMPT[:8], 50)))  # needs 4, or 2 behind what a has computed
    engine.step()
    assert late in engine.scheduler.waiting
    engine.step()
    assert late in engine.scheduler.running


def test_lower_priority_numbers_are_admitted_first() -> None:
    engine = PaperEngine(blocks=5)
    engine.submit(request("a", PROMPT, priority=1))
    engine.submit(request("b", PROMPT[::-1], priority=0))
    engine.step()
    assert [group.request.request_id for group in engine.scheduler.running] == ["b"]

"""Answers enter the prefix cache only with the flag, with the right KV, and only if blocks are free."""

from motet.block_names import block_names
from tests.engines.native.paper import BLOCK_SIZE, PaperEngine, answer, request

PROMPT = tuple(range(10))


def conversation(prompt: tuple[int, ...], seed: int, tokens: int) -> tuple[int, ...]:
    """Returns the prompt of the next turn: prompt, answer, and two more tokens."""
    return (*prompt, *answer(prompt, seed, tokens), 77, 78)


def test_without_the_flag_an_answer_is_computed_again() -> None:
    engine = PaperEngine(blocks=40)
    engine.serve(request("a", PROMPT, max_tokens=9))
    next_turn = engine.submit(request("b", conversation(PROMPT, 0, 9)))
    engine.step()
    assert next_turn.facts.num_cached == 8  # the two full blocks of the first prompt
    assert engine.pool.num_idle == 0


def test_with_the_flag_the_next_turn_finds_the_answer_in_the_prefix_cache() -> None:
    engine = PaperEngine(blocks=40, cache_answers=True)
    engine.serve(request("a", PROMPT, max_tokens=9))
    turn = conversation(PROMPT, 0, 9)
    next_turn = engine.submit(request("b", turn))
    engine.step()
    # 10 + 8 tokens are computed, without the token that was sampled last: four full blocks.
    assert next_turn.facts.num_cached == 16
    engine.run_to_end()
    assert engine.outputs["b", 0] == answer(turn, 0, 8)


def test_a_cached_answer_has_the_kv_of_the_same_tokens_in_a_prompt() -> None:
    engine = PaperEngine(blocks=40, cache_answers=True)
    engine.serve(request("a", PROMPT, n=3, max_tokens=9))
    for seed in range(3):
        known = (*PROMPT, *answer(PROMPT, seed, 9))[:18]
        table = engine.pool.find(block_names(known, BLOCK_SIZE, salt=""))
        assert len(table) == 4
        alone = PaperEngine(blocks=40)
        group = alone.submit(request("x", known))
        alone.step()
        assert engine.memory.read(table, 16) == alone.memory.read(group.trunk.blocks, 16)


def test_siblings_share_the_blocks_of_the_prompt_and_nothing_else() -> None:
    engine = PaperEngine(blocks=40, cache_answers=True)
    engine.serve(request("a", PROMPT, n=3, max_tokens=9))
    assert engine.pool.num_idle == 2 + 3 * 2  # the block that holds prompt and answer tokens is each choice's own


def test_an_answer_that_does_not_fill_a_block_takes_none() -> None:
    engine = PaperEngine(blocks=40, cache_answers=True)
    engine.serve(request("a", PROMPT, max_tokens=2))  # 11 computed
    assert engine.pool.num_idle == 2


def test_the_same_answer_is_cached_once() -> None:
    engine = PaperEngine(blocks=40, cache_answers=True)
    engine.serve(request("a", PROMPT, max_tokens=9))
    assert engine.memory.num_copied == 8  # two blocks
    engine.serve(request("b", PROMPT, max_tokens=9))
    assert engine.memory.num_copied == 8
    assert engine.pool.num_idle == 4


def test_an_answer_is_found_only_with_its_salt() -> None:
    engine = PaperEngine(blocks=40, cache_answers=True)
    engine.serve(request("a", PROMPT, max_tokens=9, cache_salt="mine"))
    turn = conversation(PROMPT, 0, 9)
    groups = [engine.submit(request(salt, turn, cache_salt=salt)) for salt in ("mine", "yours", "")]
    engine.step()
    assert [group.facts.num_cached for group in groups] == [16, 0, 0]


def test_an_answer_is_not_cached_when_blocks_are_short() -> None:
    engine = PaperEngine(blocks=6, cache_answers=True)
    engine.serve(request("a", PROMPT, max_tokens=9))  # 3 + 2 blocks; one is free, two are needed
    assert engine.pool.num_idle == 2

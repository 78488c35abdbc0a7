"""What a step leaves behind: counts, deltas, ends."""

from motet.engines.native.commit import Drawn
from motet.engines.native.sample.sampler import Sampled
from motet.types import ChoiceDelta, Finish, FinishReason, GroupDelta, PromptReport, SamplingParams, TokenLogprob
from tests.engines.native.paper import PaperEngine, answer, request

PROMPT = tuple(range(10))
LENGTH = Finish(FinishReason.LENGTH)


def test_one_delta_a_group_and_step_with_all_its_choices() -> None:
    engine = PaperEngine(blocks=20)
    engine.submit(request("a", PROMPT, n=2))
    engine.submit(request("b", PROMPT[:3]))
    engine.step()
    first = [answer(PROMPT, seed, 1)[0] for seed in range(2)]
    assert engine.deltas == [
        GroupDelta(
            request("a", PROMPT).request_id,
            (ChoiceDelta(0, (first[0],)), ChoiceDelta(1, (first[1],))),
            PromptReport(0),
        ),
        GroupDelta(request("b", PROMPT).request_id, (ChoiceDelta(0, (answer(PROMPT[:3], 0, 1)[0],)),), PromptReport(0)),
    ]


def test_the_prompt_report_comes_once_and_tells_the_cached_tokens() -> None:
    engine = PaperEngine(blocks=20)
    engine.submit(request("a", PROMPT))
    engine.run_to_end()
    engine.submit(request("b", PROMPT, max_tokens=3))
    reports = []
    while engine.groups:
        engine.step()
        reports += [delta.prompt for delta in engine.deltas]
    assert reports == [PromptReport(8), None, None]


def test_a_greedy_group_is_computed_once_and_answered_for_every_choice() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, max_tokens=2))
    group.sequences[0].indices = [0, 1, 2]
    for finish in (None, LENGTH):
        engine.step()
        (delta,) = engine.deltas
        (token,) = delta.choices[0].token_ids
        assert delta.choices == tuple(ChoiceDelta(index, (token,), None, finish) for index in range(3))
    assert engine.counters.generated_tokens == 6


def test_a_choice_that_ends_frees_its_blocks_in_that_step() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=2, max_tokens=1))
    engine.step()
    assert [choice.finish for choice in engine.deltas[0].choices] == [LENGTH, LENGTH]
    assert engine.pool.num_held == 0
    assert group.sequences == []


def test_choices_end_apart_at_their_own_tokens() -> None:
    stop = answer(PROMPT, 1, 3)[2]
    engine = PaperEngine(blocks=20, eos=frozenset({stop}))
    engine.submit(request("a", PROMPT, n=2, max_tokens=5))
    engine.run_to_end()
    assert engine.wrote["a", 0] == answer(PROMPT, 0, 5)
    assert engine.wrote["a", 1] == answer(PROMPT, 1, 3)
    assert engine.finish == {("a", 0): LENGTH, ("a", 1): Finish(FinishReason.STOP)}


def test_the_models_length_ends_a_choice() -> None:
    engine = PaperEngine(blocks=20, max_model_len=12)
    engine.submit(request("a", PROMPT, max_tokens=8))
    engine.run_to_end()
    assert engine.wrote["a", 0] == answer(PROMPT, 0, 2)
    assert engine.finish["a", 0] == LENGTH


def test_the_drawn_tokens_logprob_goes_with_it() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=2, sampling=SamplingParams(max_tokens=3, logprobs=0)))
    engine.step()
    one = TokenLogprob(5, -0.5, 1)
    drawn = [Drawn(group.sequences[0], Sampled(5, one)), Drawn(group.sequences[1], Sampled(6, None))]
    (delta,) = engine.commit.write(drawn)
    assert delta.choices == (ChoiceDelta(0, (5,), (one,)), ChoiceDelta(1, (6,), None))


def test_the_counters_tell_what_was_done() -> None:
    engine = PaperEngine(blocks=20, budget=6)
    engine.submit(request("a", PROMPT, n=3, max_tokens=3))
    engine.run_to_end()
    counters = engine.counters
    assert counters.steps == 4  # prompt in two chunks; the second draws, then two tokens more
    assert (counters.prompt_tokens, counters.prefill_tokens, counters.cached_tokens) == (10, 10, 0)
    assert (counters.generated_tokens, counters.replayed_tokens, counters.preemptions) == (9, 0, 0)
    assert (counters.forks, counters.blocks_shared, counters.bytes_saved) == (2, 6, 600)
    assert (counters.trunk_tokens_read, counters.trunk_tokens_unshared) == (20, 60)  # two steps of decode
    engine.submit(request("b", PROMPT, max_tokens=1))
    engine.run_to_end()
    assert (counters.prompt_tokens, counters.prefill_tokens, counters.cached_tokens) == (20, 12, 8)

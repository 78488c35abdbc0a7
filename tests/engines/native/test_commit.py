"""The end of a step: counts, deltas, and the tokens that end a choice."""

from motet.engines.native.sample.lanes import Sampled
from motet.engines.native.step.commit import NewTokens
from motet.types import ChoiceDelta, Finish, FinishReason, GroupDelta, PromptReport, SamplingParams, TokenLogprob
from tests.engines.native.paper import PaperEngine, answer, group_of, request

PROMPT = tuple(range(10))
LENGTH = Finish(FinishReason.LENGTH)


def test_a_step_makes_one_delta_for_each_group_with_all_its_choices() -> None:
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


def test_the_prompt_report_comes_once_with_the_number_of_cached_tokens() -> None:
    engine = PaperEngine(blocks=20)
    engine.serve(request("a", PROMPT))
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


def test_a_choice_that_ends_frees_its_blocks_in_the_same_step() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=2, max_tokens=1))
    engine.step()
    assert [choice.finish for choice in engine.deltas[0].choices] == [LENGTH, LENGTH]
    assert engine.pool.num_held == 0
    assert group.sequences == []


def test_each_choice_ends_at_its_own_token() -> None:
    stop = answer(PROMPT, 1, 3)[2]
    engine = PaperEngine(blocks=20, eos=frozenset({stop}))
    engine.serve(request("a", PROMPT, n=2, max_tokens=5))
    assert engine.outputs["a", 0] == answer(PROMPT, 0, 5)
    assert engine.outputs["a", 1] == answer(PROMPT, 1, 3)
    assert engine.finish == {("a", 0): LENGTH, ("a", 1): Finish(FinishReason.STOP)}


def test_the_maximum_model_length_ends_a_choice() -> None:
    engine = PaperEngine(blocks=20, max_model_len=12)
    engine.serve(request("a", PROMPT, max_tokens=8))
    assert engine.outputs["a", 0] == answer(PROMPT, 0, 2)
    assert engine.finish["a", 0] == LENGTH


def test_a_sampled_token_is_sent_with_its_log_probability() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=2, sampling=SamplingParams(max_tokens=3, logprobs=0)))
    engine.step()
    one = TokenLogprob(5, -0.5, 1)
    new = [NewTokens(group.sequences[0], Sampled(5, one)), NewTokens(group.sequences[1], Sampled(6, None))]
    (delta,) = engine.commit.append(new)
    assert delta.choices == (ChoiceDelta(0, (5,), (one,)), ChoiceDelta(1, (6,), None))


def test_counters_count_the_work_that_was_done() -> None:
    engine = PaperEngine(blocks=20, budget=6)
    engine.serve(request("a", PROMPT, n=3, max_tokens=3))
    counters = engine.counters
    assert counters.steps == 4  # the prompt in two chunks with the first token, then two more tokens
    assert (counters.prompt_tokens, counters.prefill_tokens, counters.cached_tokens) == (10, 10, 0)
    assert (counters.generated_tokens, counters.replayed_tokens, counters.preemptions) == (9, 0, 0)
    assert (counters.forks, counters.blocks_shared, counters.bytes_saved) == (2, 6, 600)
    assert (counters.trunk_tokens_read, counters.trunk_tokens_unshared) == (20, 60)  # two steps of decode
    engine.serve(request("b", PROMPT, max_tokens=1))
    assert (counters.prompt_tokens, counters.prefill_tokens, counters.cached_tokens) == (20, 12, 8)


EOS, STOP_TOKEN, OTHER = 2, 50, 7
SAMPLING = SamplingParams(max_tokens=10, stop_token_ids=(STOP_TOKEN,))
AT_STOP_TOKEN = Finish(FinishReason.STOP, STOP_TOKEN)


def finish(
    token_id: int, sampling: SamplingParams = SAMPLING, *, num_tokens: int = 3, total: int = 13
) -> Finish | None:
    (sequence,) = group_of(request("g", range(total - num_tokens), sampling=sampling)).sequences
    sequence.output_tokens[:] = [OTHER] * (num_tokens - 1) + [token_id]
    return PaperEngine(blocks=1, eos=frozenset({EOS}), max_model_len=100).commit.finish_of(sequence)


def test_end_of_sequence_and_a_stop_token_end_a_choice_and_only_the_latter_is_named() -> None:
    assert [finish(token) for token in (OTHER, EOS, STOP_TOKEN)] == [None, Finish(FinishReason.STOP), AT_STOP_TOKEN]


def test_end_of_sequence_can_be_ignored_but_a_stop_token_cannot() -> None:
    ignoring = SamplingParams(max_tokens=10, stop_token_ids=(STOP_TOKEN, EOS), ignore_eos=True)
    assert finish(OTHER, ignoring) is None
    assert finish(EOS, ignoring) == Finish(FinishReason.STOP, EOS)
    assert finish(EOS, SamplingParams(max_tokens=10, ignore_eos=True)) is None


def test_max_tokens_counts_output_tokens_and_the_model_length_counts_the_prompt_too() -> None:
    assert [finish(OTHER, num_tokens=num_tokens) for num_tokens in (9, 10)] == [None, Finish(FinishReason.LENGTH)]
    assert [finish(OTHER, total=total) for total in (99, 100)] == [None, Finish(FinishReason.LENGTH)]


def test_a_stop_at_the_last_allowed_token_is_a_stop() -> None:
    assert finish(EOS, num_tokens=10) == Finish(FinishReason.STOP)
    assert finish(STOP_TOKEN, num_tokens=10) == AT_STOP_TOKEN

"""The flat batch of a step, with literal values; blocks hold four tokens."""

from motet.engines.native.attention.attention_plan import PromptRead, TailRead, TrunkRead
from motet.engines.native.step.inputs import ROW_MULTIPLE, StepInputs, build_inputs
from motet.engines.native.step.sequence import Group
from motet.engines.native.step.step_plan import StepPlan, TailChunk, TrunkChunk
from motet.types import ChoiceStart, SamplingParams
from tests.engines.native.paper import group_of, request


def prompt_group(prompt: range, trunk: list[int], *, prompt_logprobs: int | None = None) -> Group:
    """Returns a group of two choices whose prompt is not computed."""
    sampling = SamplingParams(max_tokens=8, prompt_logprobs=prompt_logprobs)
    group = group_of(request("p", prompt, n=2, sampling=sampling))
    group.trunk.blocks = trunk
    return group


def decoding_group(prompt: range, trunk: list[int], *tails: tuple[list[int], list[int]]) -> Group:
    """Returns a group whose choices have output tokens: (output tokens, blocks) of each."""
    starts = [ChoiceStart(i, i, tuple(output_tokens)) for i, (output_tokens, _) in enumerate(tails)]
    group = group_of(request("d", prompt, starts=starts))
    group.trunk.blocks, group.trunk.num_computed = trunk, len(prompt)
    for sequence, (output_tokens, blocks) in zip(group.sequences, tails, strict=True):
        sequence.blocks, sequence.num_computed = blocks, len(output_tokens) - 1
    return group


def tails(group: Group) -> tuple[TailChunk, ...]:
    """Returns chunks of everything that is pending."""
    return tuple(TailChunk(s, s.num_computed, len(s.output_tokens)) for s in group.sequences)


def trunk_fields(read: TrunkRead) -> tuple[object, ...]:
    return read.begin, read.end, read.positions, read.num_keys, read.table


def prompt_fields(read: PromptRead) -> tuple[object, ...]:
    return read.begin, read.end, read.first_position, read.num_keys, read.table


def tail_fields(read: TailRead) -> tuple[object, ...]:
    return read.rows, read.rows_per_piece, read.first_offsets, read.num_keys, read.tables


def next_tokens(inputs: StepInputs) -> list[tuple[int, int, int]]:
    """Returns (choice, row of the batch, position) of each token to be sampled."""
    return [(one.sequence.indices[0], inputs.logit_rows[one.row], one.position) for one in inputs.next_tokens]


def test_a_decode_step_has_one_token_of_every_choice_and_one_read_of_their_trunk() -> None:
    group = decoding_group(range(10), [7, 8, 9], ([50], [1]), ([60, 61, 62, 63, 64], [2, 4]))
    inputs = build_inputs(StepPlan(tails(group), ()), 4)
    assert inputs.token_ids == [50, 64, 0, 0]
    assert inputs.positions == [10, 14, 0, 0]
    assert inputs.slots == [1 * 4, 4 * 4]  # padding has no slot
    assert inputs.attention.num_tail_rows == 2
    assert [trunk_fields(read) for read in inputs.attention.trunks] == [(0, 2, (10, 14), 10, [7, 8, 9])]
    assert [tail_fields(read) for read in inputs.attention.tails] == [((0, 1), 1, (0, 4), 64, ([1], [2, 4]))]
    assert next_tokens(inputs) == [(0, 0, 11), (1, 1, 15)]


def test_every_choice_of_a_fresh_group_samples_from_the_last_row_of_the_prompt() -> None:
    group = prompt_group(range(20, 26), [3, 5])
    inputs = build_inputs(StepPlan((), (TrunkChunk(group, 0, 6),)), 4)
    assert inputs.token_ids == [20, 21, 22, 23, 24, 25, 0, 0]
    assert inputs.positions == [0, 1, 2, 3, 4, 5, 0, 0]
    assert inputs.slots == [12, 13, 14, 15, 20, 21]
    assert inputs.logit_rows == [5, 0, 0, 0]  # one row for both, padded
    assert next_tokens(inputs) == [(0, 5, 6), (1, 5, 6)]
    assert [prompt_fields(read) for read in inputs.attention.prompts] == [(0, 6, 0, 64, [3, 5])]


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing() -> None:
    group = prompt_group(range(20, 26), [3, 5])
    inputs = build_inputs(StepPlan((), (TrunkChunk(group, 1, 5),)), 4)
    assert inputs.token_ids == [21, 22, 23, 24]
    assert inputs.slots == [13, 14, 15, 20]
    assert (inputs.logit_rows, inputs.next_tokens) == ([], [])


def test_tails_come_before_prompts_and_rows_are_padded_once() -> None:
    decoding = decoding_group(range(3), [0], ([50], [1]))
    reading = prompt_group(range(20, 24), [2])
    inputs = build_inputs(StepPlan(tails(decoding), (TrunkChunk(reading, 0, 4),)), 4)
    assert inputs.token_ids == [50, 20, 21, 22, 23, 0, 0, 0]
    assert inputs.positions == [3, 0, 1, 2, 3, 0, 0, 0]
    assert inputs.attention.num_tail_rows == 1
    assert [prompt_fields(read) for read in inputs.attention.prompts] == [(1, 5, 0, 64, [2])]
    assert inputs.logit_rows == [0, 4, 0, 0]


def test_a_replay_samples_only_after_the_last_output_token() -> None:
    group = decoding_group(range(3), [0], ([50, 51, 52, 53, 54, 55], [1, 4]))
    (sequence,) = group.sequences
    part = build_inputs(StepPlan((TailChunk(sequence, 0, 4),), ()), 4)
    assert (part.token_ids, part.slots, part.next_tokens) == ([50, 51, 52, 53], [4, 5, 6, 7], [])
    rest = build_inputs(StepPlan((TailChunk(sequence, 4, 6),), ()), 4)
    assert (rest.token_ids, rest.slots) == ([54, 55, 0, 0], [16, 17])
    assert next_tokens(rest) == [(0, 1, 9)]


def test_a_long_replay_is_divided_where_the_padded_keys_change() -> None:
    output_tokens = list(range(100, 240))
    group = decoding_group(range(3), [0], (output_tokens, list(range(1, 36))))
    (sequence,) = group.sequences
    inputs = build_inputs(StepPlan((TailChunk(sequence, 60, 132),), ()), 4)
    reads = [(read.rows, read.first_offsets, read.num_keys) for read in inputs.attention.tails]
    assert reads == [
        (tuple(range(4)), (60,), 64),
        (tuple(range(4, 68)), (64,), 128),
        (tuple(range(68, 72)), (128,), 192),
    ]


def test_a_prompt_chunk_is_divided_where_the_padded_keys_change() -> None:
    group = prompt_group(range(300), list(range(75)))
    inputs = build_inputs(StepPlan((), (TrunkChunk(group, 50, 250),)), 4)
    reads = [prompt_fields(read)[:4] for read in inputs.attention.prompts]
    assert reads == [(0, 14, 50, 64), (14, 78, 64, 128), (78, 142, 128, 192), (142, 200, 192, 512)]


def test_prompt_logprobs_need_the_logits_of_the_rows_before_scored_tokens() -> None:
    decoding = decoding_group(range(3), [0], ([50], [1]))
    reading = prompt_group(range(20, 26), [2, 3], prompt_logprobs=0)
    inputs = build_inputs(StepPlan(tails(decoding), (TrunkChunk(reading, 2, 6),)), 4)
    assert inputs.logit_rows == [0, 1, 2, 3, 4, 0, 0, 0]  # the last row is for the first tokens only
    assert [(r.group, r.begin, r.end, r.position) for r in inputs.prompt_rows] == [(reading, 1, 4, 2)]
    assert next_tokens(inputs) == [(0, 0, 4), (0, 4, 6), (1, 4, 6)]
    reading.facts.scored_from = 4
    inputs = build_inputs(StepPlan((), (TrunkChunk(reading, 2, 6),)), 4)
    assert inputs.logit_rows == [1, 2, 3, 0]
    assert [(r.begin, r.end, r.position) for r in inputs.prompt_rows] == [(0, 2, 3)]


def test_prompt_logprobs_that_were_reported_are_not_computed_again() -> None:
    """A group that lost its trunk computes its prompt twice."""
    group = prompt_group(range(20, 24), [2], prompt_logprobs=0)
    group.facts.reported = True
    inputs = build_inputs(StepPlan((), (TrunkChunk(group, 0, 4),)), 4)
    assert inputs.prompt_rows == []
    assert inputs.logit_rows == [3, 0, 0, 0]


def test_rows_and_logit_rows_are_padded_to_a_multiple() -> None:
    for count in range(1, 10):
        group = prompt_group(range(count), [0, 1, 2], prompt_logprobs=0)
        inputs = build_inputs(StepPlan((), (TrunkChunk(group, 0, count),)), 4)
        assert len(inputs.token_ids) == len(inputs.positions) == -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
        assert len(inputs.slots) == count
        assert len(inputs.logit_rows) % ROW_MULTIPLE == 0
        assert set(inputs.logit_rows) <= set(range(count))

"""An engine on paper: the real scheduler, inputs and commit over a memory that stores hashes instead of KV.

The entry of a position is a hash over its token, its position and all entries that attention reads for it, as KV is in
every layer after the first. One wrong, stale or missing read therefore changes every later token. The next token is a
hash too, so `answer` computes the tokens that a choice must generate, whatever happens to it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from motet.block_names import block_names
from motet.engines.native.attention.attention_plan import Table
from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.sample.lanes import Sampled
from motet.engines.native.sample.state import ChoiceSampling, PromptTokens
from motet.engines.native.scheduling.group_admission import SchedulerLimits
from motet.engines.native.scheduling.scheduler import Scheduler
from motet.engines.native.step.commit import AnswerCache, Commit, without_rejected
from motet.engines.native.step.drafts import Drafter
from motet.engines.native.step.handover import Handover
from motet.engines.native.step.inputs import StepInputs, build_inputs
from motet.engines.native.step.sequence import ChoiceSequence, Group
from motet.engines.native.step.step_plan import StepPlan
from motet.ids import RequestId
from motet.metrics.stats import EngineStats
from motet.types import ChoiceStart, Finish, GenerateRequest, GroupDelta, SamplingParams, choice_starts

BLOCK_SIZE = 4
NO_EOS = frozenset[int]()


class RequestFields(TypedDict, total=False):
    """Fields that most tests leave at their defaults."""

    sampling: SamplingParams
    cache_salt: str
    priority: int
    client: str
    client_weight: float


def request(
    name: str,
    prompt: Sequence[int],
    *,
    n: int = 1,
    max_tokens: int = 8,
    starts: Sequence[ChoiceStart] | None = None,
    **fields: Unpack[RequestFields],
) -> GenerateRequest:
    """Returns a request. `starts` wins over `n` (choice i has seed i), and `sampling` over `max_tokens`."""
    return GenerateRequest(
        request_id=RequestId(name),
        prompt=tuple(prompt),
        choices=choice_starts(n, 0) if starts is None else tuple(starts),
        sampling=fields.get("sampling", SamplingParams(max_tokens=max_tokens)),
        cache_salt=fields.get("cache_salt", ""),
        priority=fields.get("priority", 0),
        client=fields.get("client", ""),
        client_weight=fields.get("client_weight", 1.0),
    )


def group_of(request: GenerateRequest, arrival: int = 0) -> Group:
    """Returns a waiting group with one sequence for each choice."""
    group = Group(request, arrival, names=block_names(request.prompt, BLOCK_SIZE, salt=request.cache_salt))
    prompt = PromptTokens(request.prompt)
    group.sequences = [
        ChoiceSequence(
            group,
            [start.index],
            ChoiceSampling(
                request.sampling, seed=start.seed, prompt=prompt, eos_token_ids=(), output_tokens=start.output_tokens
            ),
            list(start.output_tokens),
        )
        for start in sorted(request.choices, key=lambda start: start.index)
    ]
    return group


def entry(visible: Sequence[int], token_id: int, position: int) -> int:
    """Returns the entry of a token that attends to the entries `visible`."""
    return hash((tuple(visible), token_id, position))


def next_token(last_entry: int, seed: int) -> int:
    """Returns a token of at least 1000, so that it does not occur in a prompt by chance."""
    return 1000 + hash((last_entry, seed)) % 1_000_000


def answer(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """Returns the tokens that a choice generates by definition, without blocks and steps."""
    entries: list[int] = []
    for position, token_id in enumerate(prompt):
        entries.append(entry(entries, token_id, position))
    output_tokens: list[int] = []
    while len(output_tokens) < count:
        output_tokens.append(next_token(entries[-1], seed))
        entries.append(entry(entries, output_tokens[-1], len(entries)))
    return output_tokens


@dataclass(frozen=True)
class TailSpan:
    """Output tokens of a choice that a step computes, numbered from the start of the tail."""

    group: str
    choice: int
    tokens: range


@dataclass(frozen=True)
class TrunkSpan:
    """Prompt tokens of a group that a step computes."""

    group: str
    tokens: range


@dataclass(frozen=True)
class PlannedChunks:
    """Chunks of a step, in its order."""

    tails: list[TailSpan] = field(default_factory=list)
    trunks: list[TrunkSpan] = field(default_factory=list)


def chunks(plan: StepPlan) -> PlannedChunks:
    return PlannedChunks(
        [
            TailSpan(str(c.sequence.group.request.request_id), c.sequence.rank, range(c.begin, c.end))
            for c in plan.tails
        ],
        [TrunkSpan(str(c.group.request.request_id), range(c.begin, c.end)) for c in plan.trunks],
    )


@dataclass(frozen=True)
class BlockTables:
    """Block ids of a group's trunk and of each tail."""

    trunk: list[int]
    tails: list[list[int]]


def tables(group: Group) -> BlockTables:
    return BlockTables(group.trunk.blocks, [sequence.blocks for sequence in group.sequences])


def states(group: Group) -> list[str]:
    return [sequence.state.value for sequence in group.sequences]


class PaperMemory:
    """Entries by slot, and the model that reads and writes them according to an attention plan."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._entries = [0] * (num_blocks * block_size)
        self.num_copied = 0

    def read(self, table: Sequence[int], count: int) -> list[int]:
        size = self._block_size
        return [self._entries[table[p // size] * size + p % size] for p in range(count)]

    def copy(self, source: list[int], target: list[int]) -> None:
        self.num_copied += len(source)
        values = [self._entries[slot] for slot in source]
        for slot, value in zip(target, values, strict=True):
            self._entries[slot] = value

    def run(self, inputs: StepInputs) -> list[int]:
        """Computes the entries of a step, and returns the entries of the logits rows."""
        assert len(set(inputs.slots)) == len(inputs.slots), "two rows write to one slot"
        reads = _reads(inputs)
        entries: list[int] = []
        for row, slot in enumerate(inputs.slots):
            parts = 2 if row < inputs.attention.num_tail_rows else 1
            assert len(reads[row]) == parts, "a row must read its trunk and its tail once, or its prompt once"
            visible = [value for table, count in reads[row] for value in self.read(table, count)]
            self._entries[slot] = entry(visible, inputs.token_ids[row], inputs.positions[row])
            entries.append(self._entries[slot])
        return [entries[row] for row in inputs.logit_rows]


def _reads(inputs: StepInputs) -> dict[int, list[tuple[Table, int]]]:
    """Returns what each row reads before itself, in order: (table, number of positions)."""
    plan, reads = inputs.attention, defaultdict[int, list[tuple[Table, int]]](list)
    for prompt in plan.prompts:
        for row in range(prompt.begin, prompt.end):
            position = prompt.first_position + row - prompt.begin
            assert position < prompt.num_keys
            reads[row].append((prompt.table, position))
    for trunk in plan.trunks:
        for row in range(trunk.begin, trunk.end):
            assert trunk.positions[row - trunk.begin] == inputs.positions[row]
            reads[row].append((trunk.table, trunk.num_keys))
    for tail in plan.tails:
        for i, row in enumerate(tail.rows):
            piece, within = divmod(i, tail.rows_per_piece)
            offset = tail.first_offsets[piece] + within
            assert offset < tail.num_keys
            reads[row].append((tail.tables[piece], offset))
    return reads


class PaperEngine:
    """The engine on paper: it submits, steps, aborts and stops as the core does."""

    def __init__(
        self,
        *,
        blocks: int,
        budget: int = 64,
        max_num_seqs: int = 64,
        max_model_len: int = 10_000,
        cache_answers: bool = False,
        eos: frozenset[int] = NO_EOS,
        drafter: Drafter | None = None,
    ) -> None:
        self.pool = BlockPool(blocks)
        self.counters = EngineStats()
        self.memory = PaperMemory(blocks, BLOCK_SIZE)
        limits = SchedulerLimits(
            block_size=BLOCK_SIZE, bytes_per_block=100, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        handover = Handover(
            transfers=None,
            pool=self.pool,
            counters=self.counters,
            block_size=BLOCK_SIZE,
            lease_s=60.0,
            clock=lambda: 0.0,
            settle=lambda: None,
        )
        self.scheduler = Scheduler(
            self.pool, limits, counters=self.counters, handover=handover, drafter=drafter or Drafter(0, max_model_len)
        )
        self.answers = AnswerCache(self.pool, BLOCK_SIZE, self.memory.copy)
        self.commit = Commit(
            scheduler=self.scheduler,
            counters=self.counters,
            eos_token_ids=eos,
            max_model_len=max_model_len,
            answers=self.answers if cache_answers else None,
        )
        self.groups: dict[str, Group] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        """Tokens by name of the group and index of the choice."""
        self.finish: dict[tuple[str, int], Finish] = {}
        self.deltas: list[GroupDelta] = []
        """The deltas of the last step."""
        self._arrivals = 0

    def submit(self, request: GenerateRequest) -> Group:
        group = group_of(request, self._arrivals)
        self._arrivals += 1
        self.groups[request.request_id] = group
        self.scheduler.add(group)
        return group

    def serve(self, request: GenerateRequest) -> None:
        """Submits a group, and runs all groups to their end."""
        self.submit(request)
        self.run_to_end()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def abort(self, name: str) -> None:
        self.scheduler.remove(self.groups.pop(name))
        self.scheduler.check()

    def stop(self, name: str, index: int) -> None:
        for sequence in [s for s in self.groups[name].sequences if s.indices == [index]]:
            self.scheduler.finish(sequence)
        self._forget_ended()
        self.scheduler.check()

    def step(self, on_plan: Callable[[StepPlan], None] | None = None) -> StepPlan:
        """Takes one step, and returns its plan. `on_plan` is called with the plan before it is run."""
        plan = self.scheduler.plan()
        self.scheduler.check()
        for chunk in plan.tails:
            assert (chunk.begin, chunk.sequence.group.trunk.complete) == (chunk.sequence.num_computed, True)
        if on_plan is not None:
            on_plan(plan)
        inputs = build_inputs(plan, BLOCK_SIZE)
        entries = self.memory.run(inputs)
        self.commit.advance(plan)
        next_tokens = inputs.next_tokens
        sampled = [Sampled(next_token(entries[one.row], one.sequence.sampling.seed), None) for one in next_tokens]
        new = without_rejected(next_tokens, sampled)
        drafted = [chunk for chunk in plan.tails if chunk.drafts]
        self.scheduler.drafter.update_rates(drafted, {one.sequence: len(one.more) for one in new})
        self.deltas = self.commit.append(new)
        for delta in self.deltas:
            for choice in delta.choices:
                key = (str(delta.request_id), choice.index)
                assert key not in self.finish, f"{key} continued after its end"
                self.outputs.setdefault(key, []).extend(choice.token_ids)
                if choice.finish:
                    self.finish[key] = choice.finish
        self._forget_ended()
        self.scheduler.check()
        return plan

    def run_to_end(self, *, max_steps: int = 1000) -> int:
        """Takes steps until no group is left, and returns their number."""
        steps = 0
        while self.groups:
            assert self.step(), f"nothing is scheduled, but {list(self.groups)} have not ended"
            steps += 1
            assert steps <= max_steps, f"{list(self.groups)} have not ended after {steps} steps"
        assert self.pool.num_held == 0
        return steps

    def assert_outputs(self, name: str, prompt: Sequence[int], *, n: int, tokens: int) -> None:
        """Checks that each choice of a group has generated exactly its answer."""
        for index in range(n):
            assert self.outputs[name, index] == answer(prompt, index, tokens), f"choice {index} of {name}"

    def _forget_ended(self) -> None:
        for name in [name for name, group in self.groups.items() if not group.sequences]:
            del self.groups[name]

"""Random groups of several clients, arrivals, stops and aborts in tiny pools: every choice ends, with the expected
answer."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from motet.engines.native.kv.pool import blocks_for
from motet.engines.native.step.sequence import Group, SequenceState
from motet.engines.native.step.step_plan import StepPlan
from motet.types import ChoiceStart, GenerateRequest
from tests.engines.native.paper import BLOCK_SIZE, PaperEngine, answer, request
from tests.property_settings import examples

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 24
LEAST_BLOCKS = blocks_for(MAX_MODEL_LEN, BLOCK_SIZE) + 1


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Generates prompts from few pieces, so that many have a common prefix."""
    pieces = draw(st.lists(st.sampled_from([(1, 2, 3, 4), (5, 6, 7, 8)]), max_size=3))
    return tuple(token for piece in pieces for token in piece) + draw(st.sampled_from([(1,), (2, 3), (1, 2, 3)]))


class EngineOfEveryGroup(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(LEAST_BLOCKS, LEAST_BLOCKS + 8),
        max_num_seqs=st.integers(1, 8),
        budget_to_spare=st.integers(0, 12),
        cache_answers=st.booleans(),
        unit_ms=st.sampled_from([1.0, 10.0, 100.0]),
    )
    def make(self, blocks: int, max_num_seqs: int, budget_to_spare: int, cache_answers: bool, unit_ms: float) -> None:
        self.budget = max_num_seqs + budget_to_spare
        self.max_num_seqs = max_num_seqs
        self.engine = PaperEngine(
            blocks=blocks, budget=self.budget, max_num_seqs=max_num_seqs, cache_answers=cache_answers
        )
        self.engine.scheduler.timing.unit_s = unit_ms / 1000  # steps of many, several or one row while clients share
        self.requests: dict[str, GenerateRequest] = {}
        self.cut: set[tuple[str, int]] = set()  # choices that were stopped or aborted

    @rule(
        prompt=prompts(),
        n=st.integers(1, 6),
        tokens=st.integers(1, 16),
        priority=st.integers(0, 2),
        resumed=st.lists(st.integers(0, 15), min_size=6, max_size=6) | st.none(),
        client=st.sampled_from("aab"),
    )
    def submit(
        self, prompt: tuple[int, ...], n: int, tokens: int, priority: int, resumed: list[int] | None, client: str
    ) -> None:
        tokens = min(tokens, MAX_MODEL_LEN - len(prompt))
        n = min(n, self.max_num_seqs, self.engine.pool.num_blocks - blocks_for(len(prompt), BLOCK_SIZE))
        num_output = [min(count, tokens - 1) for count in resumed or [0] * n]
        starts = [ChoiceStart(i, i, tuple(answer(prompt, i, num_output[i]))) for i in range(n)]
        name = f"g{len(self.requests)}"
        self.requests[name] = request(
            name,
            prompt,
            starts=starts,
            max_tokens=tokens,
            priority=priority,
            client=client,
            client_weight={"a": 1.0, "b": 2.5}[client],
        )
        self.engine.submit(self.requests[name])

    @precondition(lambda self: self.engine.groups)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.groups:
                self._step()

    @precondition(lambda self: self.engine.groups)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.groups)))
        self.cut |= {(name, start.index) for start in self.requests[name].choices}
        self.engine.abort(name)

    @precondition(lambda self: self.engine.groups)
    @rule(data=st.data())
    def stop_choice(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.groups)))
        index = data.draw(st.sampled_from(self.engine.groups[name].sequences)).indices[0]
        self.cut.add((name, index))
        self.engine.stop(name, index)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return  # the example ended before its first rule
        work = sum(len(g.prompt) + len(g.choices) * g.sampling.max_tokens for g in self.requests.values())
        steps = 0
        while self.engine.groups:
            self._step()
            steps += 1
            assert steps <= 2 * work, f"{list(self.engine.groups)} get nowhere"
        assert self.engine.pool.num_held == 0
        for name, group in self.requests.items():
            for start in group.choices:
                self._check_answer(name, group, start)

    def _check_answer(self, name: str, group: GenerateRequest, start: ChoiceStart) -> None:
        output = self.engine.outputs.get((name, start.index), [])
        expected = answer(group.prompt, start.seed, group.sampling.max_tokens)[len(start.output_tokens) :]
        if (name, start.index) in self.cut:
            assert output == expected[: len(output)]
        else:
            assert output == expected

    def _step(self) -> None:
        before = list(self.engine.scheduler.running.groups)
        plan = self.engine.step(on_plan=lambda plan: self._check_plan(plan, before))
        assert plan, "groups are there, and nothing was scheduled"

    def _check_plan(self, plan: StepPlan, before: list[Group]) -> None:
        scheduler = self.engine.scheduler
        tail_tokens = sum(chunk.end - chunk.begin for chunk in plan.tails)
        assert tail_tokens + sum(chunk.end - chunk.begin for chunk in plan.trunks) <= self.budget
        decoding = [one for one in plan.tails if one.sequence.num_pending <= one.sequence.num_new]
        assert len(decoding) <= self.max_num_seqs
        running = list(scheduler.running.groups)
        for client in {group.request.client for group in running}:
            own = [group for group in running if group.request.client == client]
            assert sum(len(group.sequences) for group in own) < 2 * self.max_num_seqs
            by_age = sorted((s for group in own for s in group.sequences), key=lambda s: s.age)
            runs = [sequence.state is SequenceState.RUNNING for sequence in by_age]
            assert runs == sorted(runs, reverse=True), "a younger choice of the client runs while an older one waits"
        if scheduler.clients.is_contended():
            return
        for group in running:
            if group not in before and not any(sequence.output_tokens for sequence in group.sequences):
                assert all(s.state is SequenceState.RUNNING for s in group.sequences), "all of a group or none"
        oldest = min((s for group in running for s in group.sequences), key=lambda s: s.age, default=None)
        if oldest is None:
            return
        assert oldest.state is SequenceState.RUNNING
        has_rows = sum(len(group.sequences) for group in running) <= self.max_num_seqs
        if oldest.group.trunk.complete and oldest.num_pending == 1 and has_rows:
            assert oldest in [chunk.sequence for chunk in plan.tails], "the oldest always gets on"


TestScheduler = EngineOfEveryGroup.TestCase
TestScheduler.settings = examples(60, steps=30)

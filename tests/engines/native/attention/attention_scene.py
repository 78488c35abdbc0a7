"""Runs one step of attention over running groups, with random queries, keys and values, and compares it with the
plain definition.

Keys and values belong to an owner (a group's prompt, a choice's tail) and are written into the blocks that its table
names. All other memory holds garbage.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise

import torch
from hypothesis import strategies as st

from motet.engines.native.attention.group_attention import Scores, StepAttention
from motet.engines.native.kv.pool import blocks_for
from motet.engines.native.kv.storage import KVLayout, KVStorage
from motet.engines.native.step.inputs import StepInputs, build_inputs
from motet.engines.native.step.run import LayerAttention
from motet.engines.native.step.sequence import ChoiceSequence, Group
from motet.engines.native.step.step_plan import StepPlan, TailChunk, TrunkChunk
from motet.types import ChoiceStart
from tests.engines.native.paper import group_of, request

BLOCK_SIZE = 8
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 5e-6}
"""The tolerance for bf16 is large, as it has 8 bits: kernels round their weights to it, and the merge its parts."""
Owner = Group | ChoiceSequence
Chunk = TailChunk | TrunkChunk


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.num_heads}-{self.num_kv_heads}-{self.head_dim}-{str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Rule:
    """The window and the cap of scores of a layer."""

    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Vectors:
    query: torch.Tensor  # [tokens, num_heads, head_dim]
    key: torch.Tensor  # [tokens, num_kv_heads, head_dim]
    value: torch.Tensor


MakeStep = Callable[[StepInputs, KVStorage], LayerAttention]


def torch_step(inputs: StepInputs, storage: KVStorage) -> LayerAttention:
    """Returns the attention that runs on the CPU with torch's operators."""
    return StepAttention(inputs.attention, torch.tensor(inputs.slots), storage=storage).attend


@lru_cache(maxsize=2)  # a scene requests the same numbers at each step
def random_numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(99))


class AttentionScene:
    """A pool of `blocks` blocks, one layer."""

    def __init__(
        self,
        shape: Shape,
        *,
        blocks: int = 1024,
        seed: int = 0,
        garbage: float = 100.0,
        make_step: MakeStep = torch_step,
        device: str = "cpu",
    ) -> None:
        self.shape = shape
        self._make_step = make_step
        self._device = torch.device(device)
        self.scale = shape.head_dim**-0.5
        self._blocks = blocks
        self._garbage = garbage
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._in_order = iter(range(blocks // 2))
        self.vectors: dict[Owner, Vectors] = {}
        self._groups = 0

    @cached_property
    def _shuffled(self) -> Iterator[int]:
        """The second half of the blocks, shuffled, for tables that are fragmented."""
        blocks = list(range(self._blocks // 2, self._blocks))
        random.Random(self._seed).shuffle(blocks)
        return iter(blocks)

    def decoding(
        self,
        prompt_len: int,
        tails: Sequence[tuple[int, int]],
        *,
        fragmented: bool = False,
        stem: Group | None = None,
        common: int = 0,
    ) -> tuple[TailChunk, ...]:
        """Makes a group whose prompt is computed; each choice runs its tail's positions [begin, end) in this step. The
        first `common` blocks of its trunk are the first blocks of `stem`."""
        starts = [ChoiceStart(i, i, tuple(range(end))) for i, (_, end) in enumerate(tails)]
        group = self._group(prompt_len, starts, fragmented=fragmented)
        group.trunk.num_computed = prompt_len
        if stem is not None:
            self._grow_from(stem, group, common)
        chunks = []
        for sequence, (begin, end) in zip(group.sequences, tails, strict=True):
            sequence.blocks = self._table(end, fragmented=fragmented)
            self.vectors[sequence] = self._vectors(end)
            chunks.append(TailChunk(sequence, begin, end))
        return tuple(chunks)

    def reading(self, prompt_len: int, begin: int, end: int, *, fragmented: bool = False) -> TrunkChunk:
        """Makes a group that runs positions [begin, end) of its prompt."""
        return TrunkChunk(self._group(prompt_len, [ChoiceStart(0, 0)], fragmented=fragmented), begin, end)

    def attend(self, tails: Sequence[TailChunk], trunks: Sequence[TrunkChunk], rule: Rule) -> list[torch.Tensor]:
        """Runs one step of one layer; returns the output [rows, num_heads, head_dim] of each chunk, in order."""
        (outputs,) = self.attend_layers(tails, trunks, [rule])
        return outputs

    def attend_layers(
        self, tails: Sequence[TailChunk], trunks: Sequence[TrunkChunk], rules: Sequence[Rule]
    ) -> list[list[torch.Tensor]]:
        """Runs one step of several layers that differ only in their rules; returns the outputs of each layer."""
        chunks: list[Chunk] = [*tails, *trunks]
        inputs = build_inputs(StepPlan(tuple(tails), tuple(trunks)), BLOCK_SIZE)
        step = self._make_step(inputs, self._storage(chunks))
        rows = len(inputs.token_ids)
        query = self._batch([self.vectors[_owner(c)].query[c.begin : c.end] for c in chunks], rows)
        key = self._batch([self.vectors[_owner(c)].key[c.begin : c.end] for c in chunks], rows)
        value = self._batch([self.vectors[_owner(c)].value[c.begin : c.end] for c in chunks], rows)
        ends = list(accumulate(c.end - c.begin for c in chunks))
        outputs = []
        for rule in rules:
            output = step(0, query, key, value, Scores(self.scale, rule.window, rule.softcap))
            assert output.shape[0] == 1 and output.shape[2:] == (self.shape.num_heads, self.shape.head_dim)
            assert output.dtype is self.shape.dtype
            outputs.append([output[0, begin:end].cpu() for begin, end in pairwise([0, *ends])])
        return outputs

    def assert_right(self, chunk: Chunk, output: torch.Tensor, rule: Rule) -> None:
        tolerance = TOLERANCE[self.shape.dtype]
        torch.testing.assert_close(output.double(), self.definition(chunk, rule), atol=tolerance, rtol=tolerance)

    def assert_step_right(
        self, tails: Sequence[TailChunk], trunks: Sequence[TrunkChunk], rule: Rule | None = None
    ) -> list[torch.Tensor]:
        """Checks every output of a step against the definition, and returns them."""
        rule = rule or Rule()
        outputs = self.attend(tails, trunks, rule)
        chunks: list[TailChunk | TrunkChunk] = [*tails, *trunks]
        for chunk, output in zip(chunks, outputs, strict=True):
            self.assert_right(chunk, output, rule)
        return outputs

    def definition(self, chunk: Chunk, rule: Rule) -> torch.Tensor:
        """Computes the output by the textbook, in float64: each row against all keys that it may see."""
        owner = _owner(chunk)
        parts, first = [self.vectors[owner]], 0
        if isinstance(owner, ChoiceSequence):
            parts.insert(0, self.vectors[owner.group])
            first = len(owner.group.prompt)
        siblings = self.shape.num_heads // self.shape.num_kv_heads
        keys = torch.cat([part.key for part in parts]).double().repeat_interleave(siblings, dim=1)
        values = torch.cat([part.value for part in parts]).double().repeat_interleave(siblings, dim=1)
        rows = []
        for offset in range(chunk.begin, chunk.end):
            position = first + offset
            begin = 0 if rule.window is None else max(0, position + 1 - rule.window)
            query = self.vectors[owner].query[offset].double()  # [num_heads, head_dim]
            scores = torch.einsum("hd,khd->hk", query, keys[begin : position + 1]) * self.scale
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[begin : position + 1]))
        return torch.stack(rows)

    def _group(self, prompt_len: int, starts: list[ChoiceStart], *, fragmented: bool) -> Group:
        group = group_of(request(f"g{self._groups}", range(prompt_len), starts=starts), self._groups)
        self._groups += 1
        group.trunk.blocks = self._table(prompt_len, fragmented=fragmented)
        self.vectors[group] = self._vectors(prompt_len)
        return group

    def _grow_from(self, stem: Group, group: Group, common: int) -> None:
        """Lets a group have the first blocks of another one, and what is in them."""
        group.trunk.blocks = stem.trunk.blocks[:common] + group.trunk.blocks[common:]
        theirs, own, count = self.vectors[stem], self.vectors[group], common * BLOCK_SIZE
        own.key[:count], own.value[:count] = theirs.key[:count], theirs.value[:count]

    def _table(self, num_tokens: int, *, fragmented: bool) -> list[int]:
        count = blocks_for(num_tokens, BLOCK_SIZE)
        taken = list(islice(self._shuffled if fragmented else self._in_order, count))
        assert len(taken) == count, "the scene needs more blocks"
        return taken

    def _vectors(self, num_tokens: int) -> Vectors:
        shape = self.shape
        return Vectors(
            self.random(num_tokens, shape.num_heads),
            self.random(num_tokens, shape.num_kv_heads),
            self.random(num_tokens, shape.num_kv_heads),
        )

    def random(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        """Returns random vectors [num_tokens, num_heads, head_dim]."""
        vectors = torch.randn(num_tokens, num_heads, self.shape.head_dim, generator=self._generator)
        return vectors.to(self.shape.dtype)

    def _batch(self, parts: list[torch.Tensor], rows: int) -> torch.Tensor:
        """Returns the parts as [1, heads, rows, head_dim], padded with random rows that must not matter."""
        flat = torch.cat(parts)
        padding = self.random(rows - flat.shape[0], flat.shape[1])
        return torch.cat([flat, padding]).transpose(0, 1).unsqueeze(0).to(self._device)

    def _storage(self, chunks: Sequence[Chunk]) -> KVStorage:
        """Returns memory with the KV that was computed before this step, and garbage everywhere else."""
        shape, size = self.shape, BLOCK_SIZE
        layout = KVLayout(1, size, shape.num_kv_heads, shape.head_dim, shape.dtype)
        storage = KVStorage(layout, self._blocks, device=self._device)
        slots = self._blocks * size
        numbers = random_numbers(slots, shape.num_kv_heads, shape.head_dim)
        noise = (numbers * self._garbage).to(self._device, shape.dtype)
        storage.write(0, torch.arange(slots, device=self._device), noise, noise)
        for chunk in chunks:
            owner = _owner(chunk)
            computed = [(owner, chunk.begin)]
            if isinstance(owner, ChoiceSequence):
                computed.append((owner.group, len(owner.group.prompt)))
            for one, count in computed:
                table = one.blocks if isinstance(one, ChoiceSequence) else one.trunk.blocks
                places = [table[p // size] * size + p % size for p in range(count)]
                where = torch.tensor(places, dtype=torch.int64, device=self._device)
                known = self.vectors[one]
                storage.write(0, where, known.key[:count].to(self._device), known.value[:count].to(self._device))
        return storage


@st.composite
def reading(
    draw: st.DrawFn, scene: AttentionScene, lengths: st.SearchStrategy[int], *, at_least: int = 0
) -> list[TrunkChunk]:
    """Draws up to two groups in the middle of their prompts."""
    trunks = []
    for _ in range(draw(st.integers(at_least, 2))):
        length = draw(lengths)
        begin = draw(st.integers(0, length - 1))
        end = draw(st.integers(begin + 1, length))
        trunks.append(scene.reading(length, begin, end, fragmented=draw(st.booleans())))
    return trunks


@st.composite
def tree(draw: st.DrawFn, scene: AttentionScene, lengths: st.SearchStrategy[int], *, most: int = 6) -> list[TailChunk]:
    """Draws groups whose prompts have a common prefix with an earlier prompt. Adjacent groups have most in common, as
    in a plan."""
    groups: list[tuple[TailChunk, ...]] = []
    for _ in range(draw(st.integers(2, most))):
        length = draw(lengths)
        stem = draw(st.none() | st.sampled_from([tails[0].sequence.group for tails in groups])) if groups else None
        common = draw(st.integers(0, min(length, len(stem.prompt)) // BLOCK_SIZE)) if stem else 0
        tails = draw(st.lists(st.sampled_from([(0, 1), (5, 6), (63, 64), (3, 9)]), min_size=1, max_size=3))
        groups.append(scene.decoding(length, tails, fragmented=draw(st.booleans()), stem=stem, common=common))
    groups.sort(key=lambda tails: tails[0].sequence.group.trunk.blocks)
    return [tail for tails in groups for tail in tails]


def _owner(chunk: Chunk) -> Owner:
    return chunk.sequence if isinstance(chunk, TailChunk) else chunk.group

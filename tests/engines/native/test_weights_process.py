"""New weights for an engine in its own process: the engine is held, gets the weights, and continues."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from motet.engine_orders import ApplyWeights, DropWeights, Hold, PreparedWeights, PrepareWeights
from motet.engines.native.client import NativeEngine
from motet.errors import EngineError, RequestError
from motet.models.checkpoint import Checkpoint
from motet.types import ChoiceStart, GenerateRequest, GroupDelta
from tests.engines.native.drive import group, make_core, prompt_of, run
from tests.forked import ForkingProcess
from tests.tiny_engine import engine_config
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROMPT = prompt_of(60, 3)
MANY_TOKENS = 400
"""An engine generates them in a third of a second, so the order to hold it arrives in time on a busy machine too."""
HELD_AFTER, READ_AFTER = 5, 50
"""Number of deltas before the engine is held, and number of deltas that are read after it continues."""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "other", seed=4)


@pytest.fixture
async def engine(tiny: Callable[[str], Path], forking: ForkingProcess) -> AsyncIterator[NativeEngine]:
    started = await NativeEngine.start(engine_config(tiny("llama")), spawn=forking.spawn)
    try:
        yield started
        assert (await started.stats(check=True)).blocks_used == 0
    finally:
        await started.close()


def long_group(*, written: dict[int, list[int]] | None = None, max_tokens: int = MANY_TOKENS) -> GenerateRequest:
    starts = None if written is None else [ChoiceStart(i, 7 + i, tuple(tokens)) for i, tokens in written.items()]
    return group("asked", PROMPT, n=4, seed=7, starts=starts, max_tokens=max_tokens)


def add(deltas: list[GroupDelta], to: dict[int, list[int]]) -> None:
    for delta in deltas:
        for choice in delta.choices:
            to.setdefault(choice.index, []).extend(choice.token_ids)


async def test_a_held_group_continues_with_new_weights(engine: NativeEngine, other: Path) -> None:
    stream = engine.generate(long_group())
    old: dict[int, list[int]] = {}
    new: dict[int, list[int]] = {}
    add([await anext(stream) for _ in range(HELD_AFTER)], old)
    await engine.send(Hold(True))
    held = await engine.stats()
    assert held.choices_running == 4
    prepared = await engine.send(PrepareWeights.of(Checkpoint.of(other)))
    while sum(map(len, old.values())) < held.generated_tokens:  # its output tokens from before it was held
        add([await anext(stream)], old)
    assert (await engine.stats()).generated_tokens == held.generated_tokens
    await engine.send(ApplyWeights("1"))
    assert (engine.info.weight_version, isinstance(prepared, PreparedWeights) and prepared.tensors) == ("1", 30)
    await engine.send(Hold(False))
    add([await anext(stream) for _ in range(READ_AFTER)], new)
    await stream.aclose()
    most = max(len(old[index] + new[index]) for index in new)
    expected = run(make_core(other), [long_group(written=old, max_tokens=most)])["asked"].tokens
    assert new == {index: tokens[: len(new[index])] for index, tokens in expected.items()}


async def test_weights_that_cannot_be_used_change_nothing(engine: NativeEngine, tmp_path: Path) -> None:
    before = engine.info
    with pytest.raises(RequestError, match="has no weights"):
        await engine.send(PrepareWeights.of(Checkpoint.of(tmp_path)))
    with pytest.raises(EngineError, match="no new weights are prepared"):
        await engine.send(ApplyWeights("1"))
    assert engine.info == before


async def test_dropped_weights_are_not_applied(engine: NativeEngine, other: Path) -> None:
    await engine.send(PrepareWeights.of(Checkpoint.of(other)))
    await engine.send(DropWeights())
    with pytest.raises(EngineError, match="no new weights are prepared"):
        await engine.send(ApplyWeights("1"))
    assert engine.info.weight_version == "0"

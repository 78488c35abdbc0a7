"""A model that overflows on one token. A group with that token fails at once, and other groups are not affected."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from motet.engines.native.step.ngrams import NgramIndex
from motet.errors import EngineError
from motet.types import ChoiceStart, GenerateRequest
from tests.engines.native.drive import group, make_core, prompt_of, run

pytestmark = pytest.mark.slow

INFINITE_TOKEN = 7
PROMPT = tuple(8 if token == INFINITE_TOKEN else token for token in prompt_of(40))
WELL = group("well", PROMPT, n=2, seed=3, logit_bias={INFINITE_TOKEN: -100.0})


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with one infinite embedding."""
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32)
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Embedding)
    with torch.no_grad():
        embeddings.weight[INFINITE_TOKEN] = float("inf")
    saved = tmp_path_factory.mktemp("infinite")
    model.save_pretrained(saved)
    return saved


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such weights are refused when they are loaded, but finite numbers can overflow too."""
    monkeypatch.setattr("motet.engines.native.model.check_finite", lambda *_, **__: None)


def with_broken_token(position: int) -> tuple[int, ...]:
    return (*PROMPT[:position], INFINITE_TOKEN, *PROMPT[position + 1 :])


BROKEN = {
    "first token": group("broken", with_broken_token(0)),
    "in the middle": group("broken", with_broken_token(21), n=3),
    "last token": group("broken", with_broken_token(39)),
    "in the first of several chunks": group("broken", with_broken_token(10) * 3),
    "replayed": group("broken", PROMPT, starts=[ChoiceStart(0, 0, (5, INFINITE_TOKEN, 6)), ChoiceStart(1, 1)]),
    "sampled": group("broken", PROMPT, n=2, logit_bias={INFINITE_TOKEN: 100.0}),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_group_with_numbers_that_are_not_finite_fails_and_other_groups_do_not(
    folder: Path, device: str, broken: GenerateRequest
) -> None:
    """The bug: the group got an answer computed from zeroed KV, without any error."""
    alone = run(make_core(folder, device=device), [WELL])["well"]
    outcomes = run(make_core(folder, budget=64, device=device), [WELL, broken])
    assert isinstance(outcomes["broken"].error, EngineError)
    assert outcomes["well"].error is None
    assert outcomes["well"].tokens == alone.tokens


def test_a_draft_whose_row_is_not_finite_is_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(make_core(folder, draft_tokens=0), [WELL])["well"]
    lookups: list[int] = []

    def lookup(_: NgramIndex, last: Sequence[int]) -> tuple[int, int]:
        lookups.append(len(last))
        return 0, INFINITE_TOKEN

    monkeypatch.setattr(NgramIndex, "lookup", lookup)
    core = make_core(folder, draft_tokens=4)
    outcome = run(core, [WELL])["well"]
    assert lookups
    assert outcome.error is None
    assert outcome.tokens == expected.tokens
    assert core.stats().draft_tokens == 0, "the step was run again without drafts"


def test_a_failed_group_leaves_nothing_in_the_prefix_cache(folder: Path) -> None:
    """The bug: a longer prompt found its blocks there and got an answer."""
    core = make_core(folder)
    short, long = with_broken_token(21)[:24], with_broken_token(21)
    for prompt in (short, short, long):
        assert isinstance(run(core, [group("broken", prompt)])["broken"].error, EngineError)
    assert core.stats().blocks_cached == 0


def test_two_groups_can_fail_in_one_step(folder: Path, device: str) -> None:
    broken = [group(name, with_broken_token(place)) for name, place in (("a", 3), ("b", 30))]
    outcomes = run(make_core(folder, device=device), [broken[0], WELL, broken[1]])
    assert [type(outcomes[name].error) for name in ("a", "well", "b")] == [EngineError, type(None), EngineError]

"""LongRoPE: the maximum length of an engine selects its short or its long factors, for all positions.

transformers selects by the length of each call. It uses the long factors for a prompt longer than the original length,
and the short ones for everything that is not longer. A model with equal factors always uses the same ones.
"""

import json
from pathlib import Path

import pytest
from transformers import Phi3Config

from motet.engines.native.build import build_parts
from motet.engines.native.core import EngineCore
from motet.engines.native.model import read_config
from motet.errors import ModelLoadError
from tests.engines.native.drive import group, make_core, prompt_of, run
from tests.engines.native.pair import CorePair
from tests.tiny_engine import engine_config
from tests.tiny_models import SIZES, Reference, save_model_of

ORIGINAL, LENGTH = 64, 24
PROMPT, LONG_PROMPT = prompt_of(ORIGINAL - LENGTH), prompt_of(80, 7)


def save_long_rope(folder: Path, *, rotary: float = 1.0, only_long: bool = False) -> Path:
    """Writes a tiny Phi 3. `rotary`: part of a head that has RoPE."""
    pairs = range(int(32 * rotary) // 2)
    short, long = [1.0 + 0.05 * i for i in pairs], [1.5 + 0.5 * i for i in pairs]
    config = Phi3Config(
        **{name: value for name, value in SIZES.items() if name not in ("head_dim", "hidden_size")},
        hidden_size=128,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={
            "rope_type": "longrope",
            "partial_rotary_factor": rotary,
            "short_factor": long if only_long else short,
            "long_factor": long,
        },
    )
    return save_model_of(config, folder)


def greedy(core: EngineCore, prompt: tuple[int, ...]) -> list[int]:
    return run(core, [group("g", prompt, n=2, temperature=0.0, max_tokens=LENGTH)])["g"].tokens[1]


@pytest.mark.parametrize(
    ("kernels", "rotary"), [pytest.param("compiled", 0.75, marks=pytest.mark.kernels), ("torch", 1.0)]
)
def test_tokens_equal_those_of_transformers_with_the_same_factors(kernels: str, rotary: float, tmp_path: Path) -> None:
    folder = save_long_rope(tmp_path / "model", rotary=rotary)
    reference = Reference(folder)
    core = make_core(folder, kernels=kernels, max_model_len=None)
    assert core.info.max_model_len == ORIGINAL
    with_short = greedy(core, PROMPT)
    assert with_short == reference.greedy(PROMPT, LENGTH)
    core = make_core(folder, kernels=kernels, max_model_len=ORIGINAL + 50)
    assert greedy(core, LONG_PROMPT) == reference.greedy(LONG_PROMPT, LENGTH)
    only_long = Reference(save_long_rope(tmp_path / "long", rotary=rotary, only_long=True))
    with_long = greedy(core, PROMPT)
    assert with_long == only_long.greedy(PROMPT, LENGTH)
    assert with_long != with_short, "otherwise the factors make no difference"
    assert core.info.fingerprint.endswith("-same")


@pytest.mark.kernels
def test_a_group_crosses_the_original_length_after_its_prompt_was_computed_by_another_engine(tmp_path: Path) -> None:
    folder = save_long_rope(tmp_path)
    request = group("g", PROMPT, n=3, seed=5, max_tokens=2 * LENGTH)
    expected = run(make_core(folder), [request])["g"].tokens
    pair = CorePair(folder, max_model_len=200)
    pair.hand_over(request)
    pair.finish()
    assert pair.outcomes["g"].tokens == expected
    pair.check_empty()


def test_engines_with_different_factors_do_not_share_kv_or_choices(tmp_path: Path) -> None:
    folder = save_long_rope(tmp_path)
    short, long, longer = (
        build_parts(engine_config(folder, kernels="torch", max_model_len=length)) for length in (50, 100, 200)
    )
    assert short.facts != long.facts == longer.facts
    assert short.info.model_digest != long.info.model_digest == longer.info.model_digest


@pytest.mark.parametrize("original", [1, "64", 64.5])
def test_a_broken_original_length_is_named(original: object, tmp_path: Path) -> None:
    file = save_long_rope(tmp_path) / "config.json"
    config = json.loads(file.read_bytes())
    file.write_text(json.dumps({**config, "original_max_position_embeddings": original}))
    with pytest.raises(ModelLoadError, match="original_max_position_embeddings"):
        read_config(tmp_path)

"""Choices of models of several families continue on another engine when the engine that generates them is killed."""

from pathlib import Path
from typing import Any

import pytest

from tests.fault.answers import fetch_answer
from tests.fault.fault_requests import CHAT, STREAMED, chat
from tests.fault.faults import generated, kill
from tests.fault.running_cell import TWO_DECODE_ENGINES, RunningCell
from tests.forked import ForkingProcess
from tests.tiny_architectures import save_tiny_architecture
from tests.tiny_models import FAMILIES, save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        pytest.param("gemma3", {"dtype": "bfloat16"}, id="windows"),
        pytest.param("Qwen3Moe", {"dtype": "bfloat16"}, id="experts"),
        pytest.param("DeepseekV2", {"dtype": "float32", "kernels": "torch"}, id="by torch"),
    ],
)
async def test_choices_continue_when_their_engine_is_killed(
    family: str, engine: dict[str, Any], tmp_path: Path, forking: ForkingProcess
) -> None:
    save = save_tiny_model if family in FAMILIES else save_tiny_architecture
    folder = save_tiny_tokenizer(save(family, tmp_path))
    body = chat("family", STREAMED, n=4, logprobs=True, top_logprobs=2)
    async with RunningCell(folder, cell=TWO_DECODE_ENGINES, spawn=forking.spawn, **engine) as cell:
        expected = await fetch_answer(cell.http, CHAT, body)
        cell.faults.arm(generated(20), kill)
        answer = await fetch_answer(cell.http, CHAT, body)
        assert answer.choices == expected.choices and len({choice.text for choice in answer.choices.values()}) == 4
        assert cell.moved == 1

"""Which workers may stand beside each other."""

import msgspec
import pytest

from motet.deploy.likeness import Likeness
from motet.engines.base import WorkerState
from motet.engines.fake import fake_info
from motet.engines.wire import EngineReport
from motet.ids import ModelName
from motet.types import UNKNOWN_VOCABULARY, EngineInfo, EngineKind, Role

VLLM: EngineInfo = msgspec.structs.replace(
    fake_info(),
    kind=EngineKind.VLLM,
    vocab_size=UNKNOWN_VOCABULARY,
    eos_token_ids=(),
    dtype="auto",
    fingerprint="vllm-0.32.0",
    block_size=128,
)


def reported(info: EngineInfo, **changes: object) -> EngineReport:
    changed = msgspec.structs.replace(info, **changes)
    return EngineReport(version="0", engine_id="e", state=WorkerState.READY, info=changed)


OTHERS = [
    ({"vocab_size": 9}, "it has a vocabulary of 9, and other workers of fake 512"),
    ({"eos_token_ids": (0, 1)}, "it ends answers with the tokens (0, 1), and other workers of fake (0,)"),
    ({"dtype": "bfloat16"}, "it computes in bfloat16, and other workers of fake none"),
    (
        {"fingerprint": "motet-1_kernels-1f-int8_x86_64-AVX512_none-same"},
        "it computes in none with int8 weights, and other workers of fake none",
    ),
]


@pytest.mark.parametrize(("other", "says"), OTHERS)
def test_the_first_of_a_model_says_what_its_others_must_be(other: dict[str, object], says: str) -> None:
    likeness = Likeness()
    assert likeness.problem(reported(fake_info()), None) is None
    assert likeness.problem(reported(fake_info(), **other), None) == says
    assert likeness.problem(reported(fake_info()), None) is None


@pytest.mark.parametrize("other", [other for other, _ in OTHERS])
def test_another_model_is_welcome_whatever_it_is(other: dict[str, object]) -> None:
    likeness = Likeness()
    assert likeness.problem(reported(fake_info()), None) is None
    assert likeness.problem(reported(fake_info(), model=ModelName("other"), **other), None) is None


def test_machines_and_roles_may_differ() -> None:
    likeness = Likeness()
    for info in (
        fake_info(role=Role.PREFILL),
        fake_info(role=Role.DECODE, max_model_len=100),
        msgspec.structs.replace(fake_info(), fingerprint="motet-1_torch-2_aarch64-SVE_none-similar", block_size=32),
    ):
        assert likeness.problem(reported(info), None) is None


def test_engines_of_two_kinds_are_compared_in_what_both_tell() -> None:
    likeness = Likeness()
    assert likeness.problem(reported(VLLM), None) is None
    assert likeness.problem(reported(fake_info()), None) is None
    assert likeness.problem(reported(VLLM, vocab_size=512), None) is None
    says = "it has a vocabulary of 513, and other workers of fake 512"
    assert likeness.problem(reported(VLLM, vocab_size=513), None) == says
    says = "it computes in fp8, and other workers of fake auto"
    assert likeness.problem(reported(VLLM, dtype="fp8"), None) == says


def test_one_with_another_role_than_it_was_named_with_is_not_used_and_says_nothing_of_the_model() -> None:
    likeness = Likeness()
    assert likeness.problem(reported(fake_info(role=Role.DECODE, vocab_size=9)), Role.PREFILL) == (
        "it was named as prefill, and its role is decode"
    )
    assert likeness.problem(reported(fake_info()), None) is None

"""Which workers may stand beside each other."""

import msgspec
import pytest

from motet.deploy.likeness import Likeness
from motet.engines.base import WorkerState
from motet.engines.fake import fake_info
from motet.engines.wire import EngineReport
from motet.types import EngineInfo, Role


def reported(info: EngineInfo) -> EngineReport:
    return EngineReport(version="0", engine_id="e", state=WorkerState.READY, info=info)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"model": "other"}, "it serves the model other, and the other workers fake"),
        ({"vocab_size": 9}, "it has a vocabulary of 9, and the other workers 512"),
        ({"eos_token_ids": (0, 1)}, "it ends answers with the tokens (0, 1), and the other workers (0,)"),
        ({"dtype": "bfloat16"}, "it computes in bfloat16, and the other workers none"),
        (
            {"fingerprint": "motet-1_kernels-1f-int8_x86_64-AVX512_none-same"},
            "it computes in none with int8 weights, and the other workers none",
        ),
    ],
)
def test_the_first_says_what_the_others_must_be(other: dict[str, object], says: str) -> None:
    likeness, first = Likeness(), fake_info()
    assert likeness.problem(reported(first), None) is None
    assert likeness.problem(reported(msgspec.structs.replace(first, **other)), None) == says
    assert likeness.problem(reported(first), None) is None
    assert likeness.model == first


def test_machines_and_roles_may_differ() -> None:
    likeness = Likeness()
    for info in (
        fake_info(role=Role.PREFILL),
        fake_info(role=Role.DECODE, max_model_len=100),
        msgspec.structs.replace(fake_info(), fingerprint="motet-1_torch-2_aarch64-SVE_none-similar", block_size=32),
    ):
        assert likeness.problem(reported(info), None) is None


def test_one_with_another_role_than_it_was_named_with_is_not_used_and_says_nothing_of_the_model() -> None:
    likeness = Likeness()
    assert likeness.problem(reported(fake_info(role=Role.DECODE)), Role.PREFILL) == (
        "it was named as prefill, and its role is decode"
    )
    assert likeness.model is None

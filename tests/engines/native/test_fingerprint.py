"""The probe of this machine's operators: it says yes where rows are padded, and can say no."""

import pytest
import torch

from motet.engines.native.fingerprint import fingerprint, linears_agree, operators_agree, prompts_agree, trunks_agree

MODEL = torch.nn.Sequential(torch.nn.Linear(1536, 576, bias=False), torch.nn.Linear(576, 960, bias=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_rows_agree_here_and_the_fingerprint_says_so(dtype: torch.dtype) -> None:
    model = MODEL.to(dtype)
    assert linears_agree(model, dtype) and prompts_agree(64, dtype) and trunks_agree(64, dtype)
    cpu = torch.device("cpu")
    same = operators_agree(model, head_dim=64, dtype=dtype, device=cpu)
    text = fingerprint("torch-2", same, dtype, cpu)
    assert text.endswith(f"_{str(dtype).removeprefix('torch.')}-same")
    assert "_torch-2_" in text


def test_the_probe_sees_rows_that_are_not_padded() -> None:
    counts = (1, 2, 3, 5, 6, 7)
    assert not linears_agree(MODEL.to(torch.float32), torch.float32, counts=counts), (
        "then padding would cost for nothing"
    )

"""The attention operators agree with each other, and two parts merge into the complete result."""

import pytest
import torch

from motet.engines.native.attention.group_attention import Kernel, flash_cpu, kernel_for, merge, plain

KERNELS: list[Kernel] = [flash_cpu, plain]
MINUS_INFINITY = float("-inf")


def vectors(rows: int, keys: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a query [2, 3, rows, 16], a key and a value [2, 3, keys, 16] in float32."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 3, rows, 16, generator=generator)
    key, value = (torch.randn(2, 3, keys, 16, generator=generator) for _ in range(2))
    return query, key, value


def mask_of(*visible: list[int], keys: int) -> torch.Tensor:
    """Returns a mask [1, 1, rows, keys] in which each row sees the given keys."""
    mask = torch.full((1, 1, len(visible), keys), MINUS_INFINITY)
    for row, columns in enumerate(visible):
        mask[0, 0, row, columns] = 0.0
    return mask


@pytest.mark.parametrize("rows", [1, 3, 4, 5])
def test_flash_attention_equals_the_definition(rows: int) -> None:
    query, key, value = vectors(rows, 20)
    mask = mask_of(*[list(range(row + 1)) for row in range(rows)], keys=20)
    for one_mask in (mask, None):
        output, lse = flash_cpu(query, key, value, one_mask, 0.25)
        expected, expected_lse = plain(query, key, value, one_mask, 0.25)
        assert output.shape == (2, 3, rows, 16)
        assert lse.shape == (2, 3, rows)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("kernel", KERNELS, ids=["flash", "plain"])
def test_a_row_that_sees_nothing_is_zero_and_has_no_weight(kernel: Kernel) -> None:
    query, key, value = vectors(3, 20)
    output, lse = kernel(query, key, value, mask_of([0, 1], [], [2], keys=20), 0.25)
    assert torch.equal(output[:, :, 1], torch.zeros(2, 3, 16))
    assert torch.equal(lse[:, :, 1], torch.full((2, 3), MINUS_INFINITY))
    assert lse[:, :, [0, 2]].isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS, ids=["flash", "plain"])
def test_each_table_of_a_batch_can_have_its_own_mask(kernel: Kernel) -> None:
    query, key, value = vectors(1, 8)
    masks = torch.cat([mask_of([0, 1], keys=8), mask_of([3], keys=8)])
    output, _ = kernel(query, key, value, masks, 0.25)
    for table in range(2):
        one = slice(table, table + 1)
        alone, _ = kernel(query[one], key[one], value[one], masks[one], 0.25)
        assert torch.equal(output[one], alone)
    torch.testing.assert_close(output[1, :, 0], value[1, :, 3])


def test_softcap_is_applied_before_the_mask() -> None:
    query, key, value = vectors(2, 8)
    mask = mask_of([0, 1, 2], [5], keys=8)
    output, lse = kernel_for(torch.device("cpu"), 1.5)(query, key, value, mask, 0.25)
    scores = 1.5 * torch.tanh(query[0, 0, 0] @ key[0, 0, :3].T * 0.25 / 1.5)
    torch.testing.assert_close(output[0, 0, 0], scores.softmax(-1) @ value[0, 0, :3])
    torch.testing.assert_close(lse[0, 0, 0], scores.logsumexp(-1))


def test_parts_merge_into_the_complete_result() -> None:
    query, key, value = vectors(5, 30)
    complete, _ = plain(query, key, value, None, 0.25)
    found = [plain(query, key[:, :, b:e], value[:, :, b:e], None, 0.25) for b, e in ((0, 11), (11, 13), (13, 30))]
    outputs, lses = (torch.stack(parts).flatten(1, 2) for parts in zip(*found, strict=True))
    torch.testing.assert_close(merge(outputs, lses), complete.flatten(0, 1))


def test_a_part_without_weight_leaves_the_others_as_they_are() -> None:
    one, nothing = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 2, 16)
    parts, visible, unseen = [one, nothing], torch.zeros(4, 2), torch.full((4, 2), MINUS_INFINITY)
    assert torch.equal(merge(torch.stack(parts), torch.stack([visible, unseen])), one)
    assert torch.equal(merge(torch.stack(parts[::-1]), torch.stack([unseen, visible])), one)


def test_parts_that_other_rows_have_change_no_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    parts, lse = torch.randn(7, 5, 3, 16, generator=generator), torch.randn(7, 5, 3, generator=generator)
    parts[3:6, 1], lse[3:6, 1] = 0, MINUS_INFINITY
    assert torch.equal(merge(parts, lse)[1:2], merge(parts[[0, 1, 2, 6], 1:2], lse[[0, 1, 2, 6], 1:2]))

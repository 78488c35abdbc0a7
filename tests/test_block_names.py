"""The names of prompt blocks."""

from motet.block_names import block_names


def test_only_full_blocks_have_names() -> None:
    assert [len(block_names(range(n), 4, salt="")) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_names_are_equal_up_to_the_first_different_token() -> None:
    one = block_names([1, 2, 3, 4, 5, 6, 7, 8, 9], 4, salt="")
    other = block_names([1, 2, 3, 4, 5, 6, 7, 0, 9], 4, salt="")
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_a_name_depends_on_all_tokens_before() -> None:
    """The same four tokens after another block, or at another place, have other KV."""
    plain = block_names([1, 2, 3, 4, 1, 2, 3, 4], 4, salt="")
    behind = block_names([9, 9, 9, 9, 1, 2, 3, 4], 4, salt="")
    assert len({plain[0], plain[1], behind[0], behind[1]}) == 4


def test_the_order_of_tokens_counts() -> None:
    assert block_names([1, 2, 3, 4], 4, salt="") != block_names([2, 1, 3, 4], 4, salt="")


def test_large_token_ids_are_not_cut() -> None:
    assert block_names([1, 0, 0, 0], 4, salt="") != block_names([1 + 2**16, 0, 0, 0], 4, salt="")
    assert block_names([1, 0, 0, 0], 4, salt="") != block_names([1 + 2**24, 0, 0, 0], 4, salt="")


def test_an_adapter_changes_every_name_and_is_not_a_salt() -> None:
    pairs = (("", ""), ("a", ""), ("", "a"), ("a", "a"), ("a", "b"))
    names = [block_names(range(8), 4, salt=salt, adapter=adapter) for salt, adapter in pairs]
    assert len({name for some in names for name in some}) == 10


def test_a_salt_changes_every_name() -> None:
    names = [block_names(range(8), 4, salt=salt) for salt in ("", "a", "b")]
    assert len({name for three in zip(*names, strict=True) for name in three}) == 6
    assert names[1] == block_names(range(8), 4, salt="a")

"""A queue between threads whose reader can wait in `select`."""

import os
import select

import pytest

from motet.transfer.mailbox import Mailbox


def readable(box: Mailbox[int]) -> bool:
    return bool(select.select([box.fileno()], [], [], 0)[0])


def test_a_mailbox_is_readable_while_there_is_something_to_take() -> None:
    box: Mailbox[int] = Mailbox()
    assert not readable(box)
    box.put(1)
    box.put(2)
    assert readable(box)
    assert box.take() == [1, 2]
    assert not readable(box)
    assert box.take() == []
    box.close()


def test_more_items_than_a_pipe_holds_neither_block_nor_get_lost() -> None:
    box: Mailbox[int] = Mailbox()
    many = list(range(70_000))  # a pipe holds 65,536 bytes
    for item in many:
        box.put(item)
    assert box.take() == many
    assert not readable(box)
    box.close()


def test_a_closed_mailbox_still_hands_out_what_is_in_it_and_touches_no_descriptor() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    old = box.fileno()
    box.close()
    box.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(old)
    box.put(2)
    box.ring()
    assert box.take() == [1, 2]

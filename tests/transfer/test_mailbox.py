"""The queue between two threads: its reader can wait in `select`, and nothing is lost."""

import os
import select

import pytest

from motet.transfer.mailbox import Mailbox


def readable(box: Mailbox[int]) -> bool:
    return bool(select.select([box.fileno()], [], [], 0)[0])


def test_a_mailbox_is_readable_while_it_has_items() -> None:
    box: Mailbox[int] = Mailbox()
    assert not readable(box)
    box.put(1)
    box.put(2)
    assert readable(box)
    assert box.take() == [1, 2]
    assert not readable(box)
    assert box.take() == []
    box.close()


@pytest.mark.slow
def test_more_items_than_a_pipe_holds_neither_block_nor_are_lost() -> None:
    box: Mailbox[int] = Mailbox()
    many = list(range(70_000))  # a pipe holds 65,536 bytes
    for item in many:
        box.put(item)
    assert box.take() == many
    assert not readable(box)
    box.close()


def test_a_closed_mailbox_still_returns_its_items_and_uses_no_descriptor() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    old = box.fileno()
    box.close()
    box.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(old)
    box.put(2)
    box.wake()
    assert box.take() == [1, 2]

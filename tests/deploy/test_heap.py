"""What a server has loaded at its start is out of the garbage collector's way."""

import gc

from motet.deploy.heap import freeze_heap


def test_objects_there_at_the_start_are_not_gone_through_again() -> None:
    tracked = len(gc.get_objects())
    try:
        freeze_heap()
        assert gc.get_freeze_count() > tracked / 2
        assert len(gc.get_objects()) < tracked / 2
    finally:
        gc.unfreeze()

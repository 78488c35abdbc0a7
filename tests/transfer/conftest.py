"""Two workers with transfer threads, on one network."""

from collections.abc import Iterator

import pytest

from tests.transfer.scripted import Wires
from tests.transfer.worker import Worker, worker


@pytest.fixture
def wires() -> Wires:
    return Wires()


@pytest.fixture
def p(wires: Wires) -> Iterator[Worker]:
    with worker("p", wires) as made:
        yield made


@pytest.fixture
def d(wires: Wires) -> Iterator[Worker]:
    with worker("d", wires) as made:
        yield made

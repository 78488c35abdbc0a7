"""Fixtures that are made once a test run: tiny models on disk, and the answers of transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.devices import DEVICES
from tests.engines.native.drive import prompt_of
from tests.tiny_models import Reference, save_tiny_model

if TYPE_CHECKING:
    from tests.engines.native.pair import Pair

GREEDY_TOKENS = 60
Expected = Callable[[str, int], list[int]]
MakePair = Callable[..., "Pair"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a family's tiny model."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama that can write what grammars demand."""
    from tests.engines.native.grammars import speaking_model  # needs llguidance, which tests on a GPU do without

    return speaking_model(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Makes a test run on the CPU, and on a GPU where there is one."""
    return str(request.param)


@pytest.fixture(scope="session")
def reference(tiny: Callable[[str], Path]) -> Callable[[str], Reference]:
    """Returns `transformers` over the weights of a family's tiny model."""
    made: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in made:
            made[family] = Reference(tiny(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def expected(reference: Callable[[str], Reference]) -> Expected:
    """Returns the GREEDY_TOKENS tokens that `transformers.generate` writes after a prompt, by family and length."""
    known: dict[tuple[str, int], list[int]] = {}

    def get(family: str, length: int) -> list[int]:
        if (family, length) not in known:
            known[family, length] = reference(family).greedy(prompt_of(length, length), GREEDY_TOKENS)
        return known[family, length]

    return get


@pytest.fixture
def make_pair(tiny: Callable[[str], Path]) -> "Iterator[MakePair]":
    """Makes pairs, and checks that they hold nothing when the test ends."""
    from tests.engines.native.pair import Pair  # needs ZeroMQ, which tests on a GPU do without

    made: list[Pair] = []

    def make(**changes: object) -> Pair:
        made.append(Pair(tiny("llama"), **changes))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pair in made:
        pair.check_empty()


@pytest.fixture
def pair(make_pair: MakePair) -> "Pair":
    return make_pair()

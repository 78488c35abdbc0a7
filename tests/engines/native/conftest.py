"""Fixtures for engine tests: tiny models on disk, reference answers of transformers, and pairs of engines."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.devices import DEVICES
from tests.engines.native.drive import prompt_of
from tests.engines.native.pair import CorePair
from tests.tiny_models import Reference, save_tiny_model

GREEDY_TOKENS = 60
Expected = Callable[[str, int], list[int]]
MakePair = Callable[..., CorePair]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function from a model family to the folder of its tiny model."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama whose tokenizer has the tokens that grammars need."""
    from tests.engines.native.grammars import speaking_model  # needs llguidance, which GPU machines may lack

    return speaking_model(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Runs a test on the CPU, and on a GPU if there is one."""
    return str(request.param)


@pytest.fixture(scope="session")
def reference(tiny: Callable[[str], Path]) -> Callable[[str], Reference]:
    """Returns a function from a model family to its tiny model in transformers."""
    made: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in made:
            made[family] = Reference(tiny(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def expected(reference: Callable[[str], Reference]) -> Expected:
    """Returns a function from a model family and a prompt length to the GREEDY_TOKENS tokens that
    `transformers.generate` generates."""
    known: dict[tuple[str, int], list[int]] = {}

    def get(family: str, length: int) -> list[int]:
        if (family, length) not in known:
            known[family, length] = reference(family).greedy(prompt_of(length, length), GREEDY_TOKENS)
        return known[family, length]

    return get


@pytest.fixture
def make_pair(tiny: Callable[[str], Path]) -> Iterator[MakePair]:
    """Makes pairs, and checks at the end of the test that they hold no blocks."""
    made: list[CorePair] = []

    def make(**changes: object) -> CorePair:
        made.append(CorePair(tiny("llama"), **changes))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pair in made:
        pair.check_empty()


@pytest.fixture
def pair(make_pair: MakePair) -> CorePair:
    return make_pair()

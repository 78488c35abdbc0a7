"""How many files a gateway may have open."""

import resource
from collections.abc import Iterator

import pytest

from motet.deploy.open_files import allow_open_files

NOFILE = resource.RLIMIT_NOFILE


@pytest.fixture
def hard() -> Iterator[int]:
    """The system's limit; this process's own is low for the length of a test."""
    soft, hard = resource.getrlimit(NOFILE)
    resource.setrlimit(NOFILE, (512, hard))
    yield hard
    resource.setrlimit(NOFILE, (soft, hard))


def test_a_low_limit_is_raised_to_what_is_wanted(hard: int) -> None:
    assert allow_open_files(600) == 600
    assert resource.getrlimit(NOFILE) == (600, hard)


def test_it_is_raised_no_further_than_the_system_allows(hard: int) -> None:
    wanted, given = (700, 700) if hard == resource.RLIM_INFINITY else (hard + 1, hard)
    assert allow_open_files(wanted) == given
    assert resource.getrlimit(NOFILE) == (given, hard)


def test_a_higher_one_is_left_alone(hard: int) -> None:
    assert allow_open_files(100) == 512
    assert resource.getrlimit(NOFILE) == (512, hard)

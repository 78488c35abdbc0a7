"""Hosts on which servers run."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pytest

from tests.hosts.network import Host, NoNetwork, hosts


@pytest.fixture(scope="module")
def network() -> Iterator[Mapping[str, Host]]:
    """Four hosts for servers, and one for the client."""
    with ExitStack() as stack:
        try:
            joined = stack.enter_context(hosts("one", "two", "three", "four", "client"))
        except NoNetwork as error:
            pytest.skip(f"network namespaces cannot be created here: {error}")
        yield joined

"""The socket of a server: what cannot be bound is said with the flag to change."""

import socket

import pytest

from motet.deploy.listen import listen, port_of, url_at, url_of
from motet.errors import ConfigError


def test_port_0_takes_a_free_one() -> None:
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", 0) as second:
        assert port_of(first) != port_of(second)
        assert url_of(first) == f"http://127.0.0.1:{port_of(first)}"


def test_a_taken_port_is_an_error_that_names_the_flag() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match=f"--port {port_of(taken)}: another program"):
        listen("127.0.0.1", port_of(taken))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_ours_is_an_error_that_names_the_flag(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host}"):
        listen(host, 0)


def test_a_server_on_all_addresses_is_found_on_loopback() -> None:
    with listen("0.0.0.0", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{port_of(listener)}"


def test_small_writes_leave_at_once() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(("127.0.0.1", port_of(listener))):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_url_is_one_that_a_client_on_this_machine_can_ask() -> None:
    assert url_at("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert url_at("::", 8000) == "http://[::1]:8000"
    assert url_at("10.0.0.7", 8000) == "http://10.0.0.7:8000"

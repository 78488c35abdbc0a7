"""On which port a replica's side channel is to listen."""

import socket

import pytest

from motet.config import RayConfig
from motet.deploy.listen import listen, port_of
from motet.deploy.ray.ports import TRIES, is_free, none_free, side_channel_ports
from motet.types import Role


@pytest.mark.parametrize(
    ("role", "rank", "devices", "first"),
    [
        (Role.PREFILL, 0, 1, 20000),
        (Role.PREFILL, 3, 1, 20003),
        (Role.PREFILL, 3, 2, 20006),
        (Role.DECODE, 1, 1, 22001),
    ],
)
def test_a_port_is_the_first_of_its_role_and_the_rank(role: Role, rank: int, devices: int, first: int) -> None:
    assert side_channel_ports(role, rank, RayConfig(), devices=devices) == range(first, first + TRIES)


def test_first_ports_may_be_others() -> None:
    config = RayConfig(prefill_port=30000, decode_port=40000)
    assert side_channel_ports(Role.PREFILL, 1, config, devices=1)[0] == 30001
    assert side_channel_ports(Role.DECODE, 1, config, devices=1)[0] == 40001


def test_zero_and_a_role_that_nobody_asks_take_any_free_one() -> None:
    assert list(side_channel_ports(Role.DECODE, 5, RayConfig(decode_port=0), devices=1)) == [0]
    assert list(side_channel_ports(Role.BOTH, 5, RayConfig(), devices=1)) == [0]


def test_no_port_is_beyond_the_last_one() -> None:
    assert side_channel_ports(Role.DECODE, 30, RayConfig(decode_port=65500), devices=1) == range(65530, 65536)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_free_unless_somebody_listens_there(host: str) -> None:
    with listen(host, 0) as taken:
        assert not is_free(host, port_of(taken))
    assert is_free(host, port_of_closed(host))


def port_of_closed(host: str) -> int:
    with listen(host, 0) as listener:
        return port_of(listener)


def test_a_port_whose_last_connection_is_just_over_is_free() -> None:
    """A replica takes the port of the one that it replaces."""
    with listen("127.0.0.1", 0) as listener:
        port = port_of(listener)
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # first: the connection lingers at this end
    assert is_free("127.0.0.1", port)


def test_an_address_that_is_not_here_is_not_taken() -> None:
    """All ports were said to be taken there, where the engine says that no interface has that address."""
    assert is_free("192.0.2.1", 20000)


def test_who_has_no_port_left_is_told_the_flag() -> None:
    error = none_free(range(22000, 22064), "10.0.0.1", Role.DECODE)
    assert error.message.startswith("--decode-port: all ports from 22000 to 22063 are taken on 10.0.0.1")

"""Several hosts on one machine: network namespaces, each with an address and a link to one switch.

    host ── eth0 ══════ port ── switch ── port ══════ eth0 ── host        each host and the switch: a namespace

The machine's own network is not changed. A link is cut at the switch, like an unplugged cable: no data passes, and
neither end of a connection is informed.
"""

import ctypes
import json
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.87.0"
"""Addresses of the hosts. They are not visible outside the namespaces, so all networks can use the same ones."""
CLONE_NEWNET = 0x40000000
"""Constant of <sched.h>."""
NAMESPACES = Path("/run/netns")


class NoNetwork(Exception):
    """Namespaces cannot be created here; the message has the reason."""


@dataclass(frozen=True)
class Host:
    """A network namespace with one link."""

    address: str
    namespace: str
    switch: str
    """Name of the namespace at the other end of its link."""
    port: str
    """Name of the other end of its link."""

    @property
    def under(self) -> Sequence[str]:
        """Returns a prefix for commands, with which they run on this host."""
        return ("ip", "netns", "exec", self.namespace)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that this thread creates inside the `with` belong to this host, also afterwards."""
        with open("/proc/thread-self/ns/net") as before, open(NAMESPACES / self.namespace) as inside:
            _enter(inside.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Cuts the link of the host while the `with` lasts."""
        ip("-n", self.switch, "link", "set", self.port, "down")
        try:
            yield
        finally:
            ip("-n", self.switch, "link", "set", self.port, "up")

    def bytes_received(self) -> int:
        """Returns the number of bytes received over its link so far."""
        (link,) = json.loads(ip("-n", self.namespace, "-s", "-j", "link", "show", "eth0"))
        received = link["stats64"]["rx"]["bytes"]
        assert isinstance(received, int)
        return received


@contextmanager
def hosts(*names: str) -> Iterator[Mapping[str, Host]]:
    """Yields the hosts by name, all connected to one switch. Processes on them must end before. Raises NoNetwork."""
    run = secrets.token_hex(4)  # two runs on one machine must not share names
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace(f"motet-{run}-switch"))
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        yield {
            name: _connected(stack.enter_context(_namespace(f"motet-{run}-{name}")), switch, number)
            for number, name in enumerate(names, start=1)
        }


def ip(*arguments: str) -> str:
    """Runs an `ip` command and returns its output. Raises NoNetwork."""
    try:
        return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise NoNetwork(f"there is no `ip` command: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        raise NoNetwork(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "delete", name)  # a link ends with the namespace of either end


def _connected(namespace: str, switch: str, number: int) -> Host:
    host = Host(f"{SUBNET}.{number}", namespace, switch, f"port{number}")
    link = ("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", host.port, "netns", switch)
    ip("-n", switch, *link)
    ip("-n", switch, "link", "set", host.port, "master", "switch", "up")
    ip("-n", namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
    ip("-n", namespace, "link", "set", "eth0", "up")
    return host


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")

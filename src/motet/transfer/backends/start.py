"""Starts the transport of an engine: NIXL where it is installed and can start, and otherwise shared memory if all
workers are on this machine. Workers with different transports refuse each other (`KVFacts.transport`)."""

import logging

import zmq

from motet.errors import StartupError
from motet.transfer.backends.shared_memory import SharedMemoryTransport
from motet.transfer.ticket import TransportKind, is_loopback
from motet.transfer.transport import RegisteredMemory, Transport

logger = logging.getLogger(__name__)


def start_transport(backend: str, name: str, *, memory: RegisteredMemory, host: str, poller: zmq.Poller) -> Transport:
    """Returns a new transport. Raises StartupError.

    `backend`: the setting kv_transfer_backend: auto, nixl or shared-memory. `name`: the engine id. `host`: address of
    the side channel; on loopback, all workers are on this machine. `poller`: wakes the transfer thread."""
    if backend == TransportKind.SHARED_MEMORY:
        return SharedMemoryTransport(name, memory, poller=poller)
    try:
        return _nixl(name, memory, loopback=is_loopback(host))
    except StartupError as error:
        problem = error.message
    if backend == TransportKind.NIXL or memory.device >= 0:
        remedy = "a GPU needs NIXL: pip install nixl-cu13" if memory.device >= 0 else "give --kv-transfer-backend auto"
        raise StartupError(f"{problem}; {remedy}")
    if not is_loopback(host):
        raise StartupError(
            f"{problem}, and the workers of --side-channel-host {host} can be on other machines: install NIXL, or give "
            "--kv-transfer-backend shared-memory if all workers are on this machine"
        )
    logger.info("%s: KV moves through shared memory", problem)
    return SharedMemoryTransport(name, memory, poller=poller)


def _nixl(name: str, memory: RegisteredMemory, *, loopback: bool) -> Transport:
    try:
        # Imported inside the function: NIXL can be missing, and an engine that does not use it does not load it.
        from motet.transfer.backends.nixl import LOOPBACK, NixlTransport
    except ImportError as error:
        raise StartupError(f"NIXL is not installed ({error})") from error
    return NixlTransport(name, memory, ucx=LOOPBACK if loopback else None)

"""The workers that this one reads from; each start of a worker is another peer."""

from motet.transfer.base import FailureKind, Transport
from motet.transfer.line import Line, Lines
from motet.transfer.peer import Caller, Peer, PeerState
from motet.transfer.ticket import TransferAddress

SILENT_S = 600.0
"""After so long a worker may have gone for good."""


class Peers:
    """Makes peers when they are wanted, and forgets those that are gone."""

    def __init__(self, lines: Lines, caller: Caller, transport: Transport) -> None:
        self._lines = lines
        self._caller = caller
        self._transport = transport
        self._peers: dict[TransferAddress, Peer] = {}
        self._leaving: list[Peer] = []
        """Gone, with reads that may still write."""

    @property
    def busy(self) -> bool:
        """Whether any must be looked at every millisecond."""
        return any(peer.busy for peer in self._all())

    def at(self, address: TransferAddress) -> Peer:
        """The peer at an address; a new one is asked at once. Raises TransferError for what can be no address."""
        peer = self._peers.get(address)
        if peer is None or peer.state is PeerState.GONE:
            self._sort_out()
            peer = Peer(address, self._caller, self._transport, Line(self._lines, address))
            self._peers[address] = peer
            peer.ask()
        return peer

    def advance(self) -> None:
        for peer in self._all():
            before = peer.state
            peer.advance()
            if before is PeerState.ASKING and peer.state is PeerState.MET:
                self._forget_earlier_starts(peer)
                self._ask_after_the_silent()
        self._sort_out()

    def close(self) -> None:
        for peer in self._all():
            peer.close()

    def _all(self) -> list[Peer]:
        return [*self._peers.values(), *self._leaving]

    def _forget_earlier_starts(self, met: Peer) -> None:
        for peer in list(self._peers.values()):
            same_place = (peer.address.host, peer.address.port) == (met.address.host, met.address.port)
            if same_place and peer is not met:
                peer.lose(f"{peer} was restarted", FailureKind.RESTARTED)

    def _ask_after_the_silent(self) -> None:
        """Workers come and go for months: those that went are noticed when others come."""
        silent_since_s = self._caller.clock() - SILENT_S
        for peer in self._peers.values():
            if peer.ready and peer.heard_s <= silent_since_s:
                peer.ask()

    def _sort_out(self) -> None:
        """Who is gone is no longer found; who is closed is forgotten."""
        for address, peer in list(self._peers.items()):
            if peer.state is PeerState.GONE:
                self._leaving.append(self._peers.pop(address))
        self._leaving = [peer for peer in self._leaving if not peer.closed]

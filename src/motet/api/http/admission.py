"""Which requests a server accepts, decided before the first byte of an answer.

Rights         the permissions of one API key's requests, its weight, and the salt of its cached prompts
Admission      the maximum number of groups that wait for their first token; refuses all groups while the server drains
KeyLimits      the maximum numbers of unanswered requests and choices of one API key
AnswerMemory   the maximum memory of answers that are kept, counted while they grow

While groups of several clients wait, each client is entitled to a share of the maximum number of waiting groups by its
weight, and at least to one group, even if the maximum is reached. So all waiting groups together can exceed the
maximum, but the groups of one client never do. The memory of answers has equal shares.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from motet.errors import DrainingError, OverloadedError, RateLimitedError, RequestError
from motet.settings.parsed_values import MIN_WEIGHT, integers_by_key, weights_by_key
from motet.settings.server_config import ServerConfig


class Admission:
    """Counts the open groups, and those among them that wait for their first token."""

    def __init__(self, max_waiting: int, *, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: weights of clients by name, 1 for all others."""
        self._max_waiting = max_waiting
        self._weights = weights or {}
        self.draining = False
        self.waiting = 0
        self.open = 0
        self.background_waiting = self.background_open = 0
        """Number of groups of batches among `waiting` and among `open`."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when `waiting` or `open` has changed. Set by the runner of batches."""
        self._waiting_of: Counter[str] = Counter()
        """Number of waiting groups of each client that has any."""
        self._empty = asyncio.Event()
        self._empty.set()

    async def empty(self) -> None:
        await self._empty.wait()

    def check_capacity(self, num_groups: int, *, client: str) -> None:
        """Raises if this number of groups of one client would not be admitted now."""
        if self.draining:
            raise DrainingError("The server is draining and takes no new requests; try another one.")
        share = self._share(client) if self._waiting_of.keys() - {client} else 0
        if self.waiting + num_groups > self._max_waiting and self._waiting_of[client] + num_groups > share:
            raise OverloadedError(
                f"The server is overloaded: {self.waiting} groups wait for their first token and this request has "
                f"{num_groups}, while at most {self._max_waiting} may wait. Try again later."
            )

    def _share(self, client: str) -> int:
        """Returns the number of waiting groups to which the client is entitled."""
        total = sum(self._weights.get(other, 1.0) for other in self._waiting_of.keys() | {client})
        return max(1, int(self._max_waiting * self._weights.get(client, 1.0) / total))

    def admit(self, *sizes: int, client: str) -> list["AdmissionSlot"]:
        """Returns a slot for each number of groups in `sizes`. Raises unless all groups can be admitted."""
        self.check_capacity(sum(sizes), client=client)
        return [AdmissionSlot(self, size, client=client) for size in sizes]

    def entered(self, num_groups: int, *, client: str) -> None:
        self.waiting += num_groups
        self._waiting_of[client] += num_groups
        self.open += num_groups
        if is_batch_client(client):
            self.background_waiting += num_groups
            self.background_open += num_groups
        self._empty.clear()

    def started(self, num_groups: int, *, client: str) -> None:
        self.waiting -= num_groups
        self._waiting_of[client] -= num_groups
        if not self._waiting_of[client]:
            del self._waiting_of[client]
        if is_batch_client(client):
            self.background_waiting -= num_groups
        self.on_change()

    def left(self, num_groups: int, *, client: str) -> None:
        self.open -= num_groups
        if is_batch_client(client):
            self.background_open -= num_groups
        if not self.open:
            self._empty.set()
        self.on_change()

    def check(self) -> None:
        sound = 0 <= self.background_waiting <= self.waiting and self.background_open <= self.open
        if not sound or not 0 <= self.waiting <= self.open or self.waiting != self._waiting_of.total():
            raise AssertionError(f"{self.waiting} groups waiting, {self.open} open")


class AdmissionSlot:
    """The slot of one or several groups, from admission to the end. Both methods can be called repeatedly."""

    def __init__(self, admission: Admission, num_groups: int, *, client: str) -> None:
        self._admission = admission
        self._client = client
        self._waiting = self._open = num_groups
        admission.entered(num_groups, client=client)

    def started(self) -> None:
        """Called at the first token."""
        if self._waiting:
            self._admission.started(self._waiting, client=self._client)
        self._waiting = 0

    def leave(self) -> None:
        self.started()
        self._admission.left(self._open, client=self._client)
        self._open = 0


ANONYMOUS = "anonymous"
"""The client of all requests without an API key."""
ANOTHER_SERVER = "another server"
"""The client of all requests of gateways."""
BATCH_SUFFIX = " batch"
"""End of the names of clients whose requests are lines of batches. They have limits and a share of their own."""
OTHER_CLIENTS = "other"
"""Name of all clients together that have no API key of this server, in metrics and `/status`."""


@dataclass(frozen=True)
class Rights:
    """The permissions and the weight of one client's requests."""

    cache_salt: str = ""
    """The start of the salt of its cached prompts. Prompts without any salt are shared with all other such prompts."""
    min_priority: int | None = None
    """The minimum priority of its requests; requests with higher numbers start later. None if any is allowed."""
    client_id: str = ""
    """`GenerateRequest.client` of its requests. Empty for requests without a key, whose ids depend on the request
    (`client_id_of`)."""
    client_weight: float = 1.0
    """`GenerateRequest.client_weight` of its requests."""
    background: bool = False
    """True if its requests run after all others (`BACKGROUND_PRIORITY`)."""


EVERYTHING = Rights()


def batch_client(client: str) -> str:
    """Returns the name under which the lines of a client's batches are counted."""
    return client + BATCH_SUFFIX


def is_batch_client(client: str) -> bool:
    return client.endswith(BATCH_SUFFIX)


def rights_of(config: ServerConfig) -> Mapping[str, Rights]:
    """Returns the rights of each client with an API key, by the client's name."""
    several, named = len(config.api_keys) > 1, integers_by_key(config.key_priority)
    weights = weights_by_key(config.key_share)
    salted = config.cache_salt_per_key == "on" or (config.cache_salt_per_key == "auto" and several)
    rights = {
        f"key-{number}": Rights(
            # The key is hashed and not its number, so that servers with the same keys use the same block names.
            hashlib.sha256(b"motet cache salt\0" + key.encode()).hexdigest() if salted else "",
            named.get(key, 0 if several else None),
            client_id=client_id_of(key),
            client_weight=weights.get(key, 1.0),
        )
        for number, key in enumerate(config.api_keys)
    }
    if config.batches.batch_dir is None:
        return rights
    owners = rights or {ANONYMOUS: EVERYTHING}
    return rights | {batch_client(client): _in_background(client, own) for client, own in owners.items()}


def _in_background(client: str, rights: Rights) -> Rights:
    """Returns the rights of the lines of a client's batches."""
    own_id = client_id_of(batch_client(rights.client_id or client))
    return replace(rights, min_priority=None, client_id=own_id, client_weight=MIN_WEIGHT, background=True)


def client_id_of(text: str) -> str:
    """Returns a `GenerateRequest.client`. `text`: the API key of the request, or without one `Caller.work_client`."""
    return hashlib.sha256(b"motet share\0" + text.encode(errors="surrogatepass")).hexdigest()[:16]


class ClientLoad(NamedTuple):
    """The unanswered requests of one client."""

    requests: int = 0
    choices: int = 0


class AnswerMemory:
    """Counts the bytes of answers that are kept until their end, because they are not streamed, or repeat their content
    at the end. It also counts tokens that wait for slower choices (`policies.lockstep`).

    The bytes are counted while the answers grow. They cannot be estimated from `max_tokens`, which few choices reach,
    and which is the model's maximum if a request has none."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._bytes_of: Counter[str] = Counter()
        """Bytes of each client that has any."""

    def grow(self, client: str, more: int, *, answer_bytes: int) -> None:
        """Counts `more` bytes of an answer, which has `answer_bytes` now. `more` is negative if it has shrunk. Raises
        `RequestError` if this answer exceeds the maximum, and `OverloadedError` if all together exceed it and the
        client has more than an equal share."""
        self.num_bytes += more
        self._bytes_of[client] += more
        if more <= 0 or self.num_bytes <= self.max_bytes:
            return
        if answer_bytes > self.max_bytes:
            raise answer_too_large(f"it has grown to {answer_bytes} bytes", maximum=self.max_bytes)
        if self._bytes_of[client] > self.max_bytes // len(self._bytes_of):
            raise OverloadedError(
                f"The server is overloaded: unfinished answers take {self.num_bytes} bytes, while at most "
                f"{self.max_bytes} are allowed (--max-open-answer-bytes). Try again later, or with 'stream'."
            )

    def free(self, client: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._bytes_of[client] -= num_bytes
        if not self._bytes_of[client]:
            del self._bytes_of[client]


class KeyLimits:
    """Counts the unanswered requests and choices of each client. A limit of 0 means no limit."""

    def __init__(
        self, *, max_requests: int, max_choices: int, max_answer_bytes: int = ServerConfig.max_open_answer_bytes
    ) -> None:
        self.answers = AnswerMemory(max_answer_bytes)
        self._max_requests = max_requests
        self._max_choices = max_choices
        self.clients: dict[str, ClientLoad] = {}

    @property
    def num_choices(self) -> int:
        return sum(load.choices for load in self.clients.values())

    def check(self, client: str, num_choices: int) -> None:
        """Raises if a request with this number of choices would not be accepted now: `RateLimitedError` for an API key
        at its limit; without API keys `OverloadedError`, or `RequestError` if it would never be accepted."""
        load = self.clients.get(client, ClientLoad())
        for what, now, more, limit in (
            ("requests", load.requests, 1, self._max_requests),
            ("choices", load.choices, num_choices, self._max_choices),
        ):
            if limit and now + more > limit:
                raise _above(what, client, now=now, more=more, limit=limit)

    def enter(self, client: str, num_choices: int) -> None:
        """Counts a request with its choices until `leave`. Raises and counts nothing if it exceeds a limit."""
        self.check(client, num_choices)
        load = self.clients.get(client, ClientLoad())
        self.clients[client] = ClientLoad(load.requests + 1, load.choices + num_choices)

    def leave(self, client: str, num_choices: int) -> None:
        """Undoes one `enter`. Must be called once for each `enter`."""
        load = self.clients.pop(client, ClientLoad())
        left = ClientLoad(load.requests - 1, load.choices - num_choices)
        if min(left) < 0:
            raise AssertionError(f"{client} has {left} after a request left")
        if left != ClientLoad():
            self.clients[client] = left


def answer_too_large(why: str, *, maximum: int, param: str | None = None) -> RequestError:
    """Returns the error for an answer above the `maximum` number of bytes."""
    advice = "Request fewer choices, tokens or log-probabilities, or set 'stream'"
    message = f"The answer is too large: {why}, while this server keeps {maximum} bytes (--max-open-answer-bytes)."
    return RequestError(f"{message} {advice}.", param=param, code="answer_too_large")


class AnswerBytes:
    """The bytes of one answer in `AnswerMemory`."""

    def __init__(self, memory: AnswerMemory, client: str | None) -> None:
        """`client`: None for another Motet server."""
        self._memory = memory
        self._client = client or ANOTHER_SERVER
        self._num_bytes = 0

    def set(self, num_bytes: int) -> None:
        """Counts the answer's bytes, which are `num_bytes` now. Raises the errors of `AnswerMemory.grow`."""
        more, self._num_bytes = num_bytes - self._num_bytes, num_bytes
        self._memory.grow(self._client, more, answer_bytes=num_bytes)

    def free(self) -> None:
        """Stops counting the answer. Can be called repeatedly."""
        if self._num_bytes:
            self._memory.free(self._client, self._num_bytes)
            self._num_bytes = 0


class KeySlot:
    """One request in the counts of its client."""

    def __init__(self, limits: KeyLimits, client: str | None, *, num_choices: int) -> None:
        """`client`: None if another Motet server has counted the choices, so that this server counts none."""
        self.client = client or ANOTHER_SERVER
        self._limits = limits
        self._num_choices = num_choices
        self._limited = client is not None
        self._entered = False
        self.answer_bytes = AnswerBytes(limits.answers, self.client)

    def enter(self) -> None:
        """Raises the errors of `KeyLimits.enter`."""
        if self._limited:
            self._limits.enter(self.client, self._num_choices)
            self._entered = True

    def leave(self) -> None:
        """Stops counting the request. Can be called repeatedly, and without `enter`."""
        if self._entered:
            self._entered = False
            self._limits.leave(self.client, self._num_choices)
        self.answer_bytes.free()


def _above(what: str, client: str, *, now: int, more: int, limit: int) -> RequestError | OverloadedError:
    """Returns the error for `more` requests or choices in addition to `now` unanswered ones, above the `limit`."""
    if client == ANONYMOUS and more > limit:
        numbers = f"{more} in one request, while this server allows {limit} in progress in total"
        return RequestError(f"Too many {what}: {numbers}.", code=f"too_many_{what}")
    numbers = f"{now} in progress and {more} more requested, while at most {limit} are allowed at a time"
    if client == ANONYMOUS:
        return OverloadedError(f"The server is overloaded: {what}: {numbers}. Try again when some have ended.")
    return RateLimitedError(
        f"Rate limit reached for {what} of your API key: {numbers}. Try again when some have ended."
    )

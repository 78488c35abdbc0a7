"""A streaming client of chat servers: sends a request and reads the stream into one object per choice, with times.

`Conversation` does no I/O: the terminal feeds it from a synchronous client, benchmarks from an asynchronous one. It
reads streams of chats and of completions."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from motet.engines.refusals import OpenAIError, error_in
from motet.errors import EngineError, MotetError
from motet.log import cut
from motet.settings.server_url import url_of_flag

DATA = "data: "
DONE = "[DONE]"
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0
"""Maximum time between two chunks; long, since long prompts can be ahead in the queue."""
MAX_LINE_BYTES = 16 * 2**20
"""Maximum size of a line of a stream."""
MAX_LIST_BYTES = 2**20
"""Maximum size of a list of models that is read."""
DEFAULT_TEMPERATURE = 0.4
"""Temperature of models that have no default."""
MAX_REFUSAL_BYTES = 64 * 2**10
"""Number of bytes of a refusal that are read."""
MAX_ERROR_CHARS = 2000
"""Number of characters of a server's error that are shown."""


@dataclass(frozen=True)
class ChatQuestion:
    messages: Sequence[Mapping[str, str]]
    n: int
    max_tokens: int
    temperature: float
    seed: int | None = None
    model: str | None = None
    """Needed by a server with several models."""

    def body(self) -> dict[str, object]:
        body: dict[str, object] = {
            "messages": list(self.messages),
            "n": self.n,
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        optional = {"seed": self.seed, "model": self.model}
        return body | {name: value for name, value in optional.items() if value is not None}


class _ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None


class CountedUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _StreamChunk(msgspec.Struct):
    choices: list[_ChunkChoice] = []
    usage: CountedUsage | None = None
    error: OpenAIError | None = None


class _ListedCard(msgspec.Struct):
    id: str
    default_sampling_params: dict[str, float] | None = None


class _ListedCards(msgspec.Struct):
    data: list[_ListedCard]


CHUNK = msgspec.json.Decoder(_StreamChunk)


@dataclass
class StreamedChoice:
    """One choice, as far as it was received."""

    text: str = ""
    reasoning: str = ""
    """Reasoning before the text, which is not part of the conversation."""
    finish_reason: str | None = None
    first_s: float | None = None
    """Seconds until the first text or reasoning."""


class Conversation:
    """One request and its n answers. Times count from the construction of this object."""

    def __init__(self, n: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.answers = [StreamedChoice() for _ in range(n)]
        self.usage: CountedUsage | None = None
        self.total_s: float | None = None
        """Seconds until the end of the stream; None before the end."""
        self._clock = clock
        self._started = clock()

    @property
    def done(self) -> bool:
        return self.total_s is not None

    @property
    def started(self) -> bool:
        """True if an answer has text or reasoning."""
        return any(answer.text or answer.reasoning for answer in self.answers)

    @property
    def first_s(self) -> float | None:
        """Seconds until the first answer had text."""
        return min((a.first_s for a in self.answers if a.first_s is not None), default=None)

    def feed(self, line: str) -> None:
        """Reads one line of the stream. Raises `EngineError` if it reports a failure of the server or is invalid."""
        if not line.startswith(DATA):
            return
        data = line.removeprefix(DATA)
        now_s = self._clock() - self._started
        if data == DONE:
            self.total_s = now_s
            return
        try:
            chunk = CHUNK.decode(data)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise EngineError(f"the server sent a chunk that cannot be read: {cut(str(exc), MAX_ERROR_CHARS)}") from exc
        if chunk.error:
            raise EngineError(f"the server failed: {cut(chunk.error.message, MAX_ERROR_CHARS)}")
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self._take(choice, now_s)

    def _take(self, choice: _ChunkChoice, now_s: float) -> None:
        if not 0 <= choice.index < len(self.answers):
            raise EngineError(f"the server sent choice {choice.index}, and {len(self.answers)} choices were requested")
        answer = self.answers[choice.index]
        text = choice.text or (choice.delta.content if choice.delta else None) or ""
        reasoning = (choice.delta.reasoning_content if choice.delta else None) or ""
        if (text or reasoning or choice.finish_reason) and answer.first_s is None:
            answer.first_s = now_s
        answer.text += text
        answer.reasoning += reasoning
        answer.finish_reason = choice.finish_reason or answer.finish_reason


def connect(url: str, *, api_key: str | None = None) -> httpx.Client:
    """Returns a client of the server at `url`: see `url_of_flag`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=url_of_flag(url), headers=headers, timeout=timeout)


def nothing() -> None:
    """Does nothing after a chunk."""


def stream_answers(
    question: ChatQuestion,
    conversation: Conversation,
    *,
    client: httpx.Client,
    after_chunk: Callable[[], None] = nothing,
) -> None:
    """Sends a request and reads all answers. `after_chunk` is called after each line of the stream. Raises `MotetError`
    if the server refuses, fails or cannot be reached."""
    try:
        with client.stream("POST", "/v1/chat/completions", json=question.body()) as response:
            _check_status(response)
            for line in _lines_of(response):
                conversation.feed(line)
                after_chunk()
    except httpx.HTTPError as exc:
        raise MotetError(_unreachable(client, exc)) from exc
    if not conversation.done:
        raise MotetError("the server closed the stream before its end")


def default_temperature(client: httpx.Client, model: str | None) -> float:
    """Returns the temperature that the server lists as the default of a model, or of its first model; 0.4 if it lists
    none, or cannot be reached."""
    content = bytearray()
    try:
        with client.stream("GET", "/v1/models") as response:
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MAX_LIST_BYTES:
                    break
        cards = msgspec.json.decode(content, type=_ListedCards).data
    except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError):
        return DEFAULT_TEMPERATURE
    defaults = next((card.default_sampling_params for card in cards if model in (None, card.id)), None)
    return (defaults or {}).get("temperature", DEFAULT_TEMPERATURE)


def check_server(client: httpx.Client) -> None:
    """Raises `MotetError` if the server cannot be reached, or refuses the API key."""
    try:
        with client.stream("GET", "/v1/models") as response:
            _check_status(response)
    except httpx.HTTPError as exc:
        raise MotetError(_unreachable(client, exc)) from exc


def _unreachable(client: httpx.Client, error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"{client.base_url} does not answer ({error}): start a server with `motet serve`, or correct --url"
    return f"{client.base_url}: {error}"


def _lines_of(response: httpx.Response) -> Iterator[str]:
    """Yields the lines of a stream. Raises EngineError if a line is too long. `httpx.Response.iter_lines` has no limit,
    and also splits at U+0085, U+2028 and others in texts."""
    rest = bytearray()
    for piece in response.iter_bytes():
        *ends, last = piece.split(b"\n")
        for end in ends:
            yield (rest + end).removesuffix(b"\r").decode(errors="replace")
            rest.clear()
        rest += last
        if len(rest) > MAX_LINE_BYTES:
            raise EngineError(f"the server sent a line of more than {MAX_LINE_BYTES} bytes")
    yield rest.decode(errors="replace")


def _check_status(response: httpx.Response) -> None:
    """Raises `MotetError`, with the server's reason, unless the status is 200. Reads the start of the body."""
    if response.status_code == httpx.codes.OK:
        return
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > MAX_REFUSAL_BYTES:
            break
    error = error_in(bytes(body))
    reason = f": {cut(error.message, MAX_ERROR_CHARS)}" if error and error.message else ""
    advice = " (--api-key)" if response.status_code == httpx.codes.UNAUTHORIZED else ""
    raise MotetError(f"the server answered {response.status_code}{reason}{advice}")

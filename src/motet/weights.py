"""For trainers: gives a running server new weights.

    from motet import weights

    weights.push("http://127.0.0.1:8000", model.named_parameters(), version="1")

The tensors become one safetensors file. If the server runs on the same machine as the same user, the file is in memory
(a temporary file on a system without files in memory), and the server opens it; else it is the body of a request. The
server must have been started with `--rl`."""

import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import SplitResult, urlencode, urlsplit

import torch

from motet.models.checkpoint import TensorFacts, safetensors_header
from motet.models.memory_file import MemoryFile

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
"""The name of each dtype in safetensors files."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
TIMEOUT_S = 600.0
BUSY_CODE = "overloaded"
"""Code of the error of a server that has no memory for the tensors now, because it receives others."""

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class Delivery(StrEnum):
    """The way in which the tensors get to the server."""

    MEMORY = "memory"
    """Through memory or a file that both processes can open: on one machine, in one container, as one user."""
    HTTP = "http"


class PushError(Exception):
    """The server has refused the weights, and keeps its previous ones. `status`: status code of its response.
    `retry_after_s`: time in seconds after which a busy server can accept them; None if a retry cannot help."""

    def __init__(
        self, message: str, *, status: int, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s


def push(
    server: str,
    named_tensors: NamedTensors,
    *,
    version: str | None = None,
    admin_key: str | None = None,
    way: Delivery | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Gives all engines of a server, or of a gateway's workers, new weights, and returns their version.

    `server`: URL of the server, with or without /v1. `named_tensors`: `model.named_parameters()`, a state dict, or only
    some of their tensors, with the names of the Hugging Face checkpoint, in bfloat16, float16 or float32 and on any
    device; the engines round them to their own dtype. `version`: name of the weights, by default the number of updates.
    `way`: by default memory if the server's address is a loopback address and the server can open that memory, else
    HTTP. `timeout_s`: maximum time to wait for a response. A server that has no memory for the tensors, because it
    receives others, is tried again for the same time. Raises PushError if the server refuses the weights, ValueError
    for tensors that cannot be sent, OSError without a connection or memory."""
    target = Target.of(server, admin_key=admin_key, timeout_s=timeout_s)
    tensors = dict(named_tensors)
    if way is not Delivery.HTTP and (way is Delivery.MEMORY or target.url.hostname in LOOPBACK):
        try:
            return _unless_busy(lambda: _share(target, tensors, version=version), timeout_s=timeout_s)
        except PushError as error:
            if way is Delivery.MEMORY or error.param != "weight_file":
                raise  # otherwise, the server cannot open the memory of this process
    return _unless_busy(lambda: _send(target, tensors, version=version), timeout_s=timeout_s)


def _unless_busy(send: Callable[[], str], *, timeout_s: float) -> str:
    """Calls `send` again while the server is busy, for at most this time."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return send()
        except PushError as error:
            if error.retry_after_s is None or time.monotonic() + error.retry_after_s > end_s:
                raise
            time.sleep(error.retry_after_s)


@dataclass(frozen=True)
class Target:
    url: SplitResult
    headers: Mapping[str, str]
    timeout_s: float

    @classmethod
    def of(cls, server: str, *, admin_key: str | None, timeout_s: float) -> "Target":
        url = urlsplit(server.rstrip("/").removesuffix("/v1"))
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"'{server}' is not the URL of a server: expected http://HOST:PORT or https://HOST:PORT")
        return cls(url, {"authorization": f"Bearer {admin_key}"} if admin_key else {}, timeout_s)

    def post(self, query: Mapping[str, str], body: Iterable[memoryview], *, content_type: str, length: int) -> str:
        """Posts to /update_weights, and returns the new version of the weights. Raises PushError."""
        make = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        connection = make(self.url.hostname or "", self.url.port, timeout=self.timeout_s)
        try:
            path = f"{self.url.path}/update_weights" + (f"?{urlencode(query)}" if query else "")
            connection.putrequest("POST", path)
            for name, value in {**self.headers, "content-type": content_type, "content-length": str(length)}.items():
                connection.putheader(name, value)
            connection.endheaders()
            try:
                for part in body:
                    connection.send(part)
            except ConnectionError:  # a server that refuses the weights does not read the rest
                pass
            response = connection.getresponse()
            return _version_in(response.status, response.read(), retry_after=response.getheader("retry-after", ""))
        finally:
            connection.close()


def _version_in(status: int, body: bytes, *, retry_after: str) -> str:
    try:
        fields = json.loads(body)
    except ValueError:
        fields = {}
    if status == http.HTTPStatus.OK and isinstance(fields, dict):
        if "weight_version" not in fields:
            raise PushError(
                "The server has an update in several bodies open, and has added these tensors to it.", status=status
            )
        return str(fields["weight_version"])
    error = fields.get("error") if isinstance(fields, dict) else None
    error = error if isinstance(error, dict) else {}
    message = error.get("message") or body[:500].decode(errors="replace")
    busy = error.get("code") == BUSY_CODE and retry_after.isascii() and retry_after.isdigit()
    raise PushError(
        f"The server answered {status}: {message}",
        status=status,
        param=error.get("param"),
        retry_after_s=max(1.0, float(retry_after)) if busy else None,
    )


def _share(target: Target, tensors: Mapping[str, torch.Tensor], *, version: str | None) -> str:
    header = _header(tensors)
    file = MemoryFile.create(len(header) + sum(tensor.nbytes for tensor in tensors.values()))
    try:
        at = 0
        for part in _parts(header, tensors):
            at = file.write(part, at)
        file.seal()
        order = {"weight_file": str(file.path)} | ({} if version is None else {"weight_version": version})
        body = json.dumps(order).encode()
        return target.post({}, [memoryview(body)], content_type="application/json", length=len(body))
    finally:
        file.close()


def _send(target: Target, tensors: Mapping[str, torch.Tensor], *, version: str | None) -> str:
    header = _header(tensors)
    query = {} if version is None else {"weight_version": version}
    length = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    return target.post(query, _parts(header, tensors), content_type="application/octet-stream", length=length)


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns the header of the file. Raises ValueError for a tensor that the file cannot have."""
    facts = []
    for name, tensor in tensors.items():
        if (dtype := DTYPES.get(tensor.dtype)) is None:
            raise ValueError(f"tensor {name}: its dtype is {tensor.dtype}; {', '.join(map(str, DTYPES))} can be sent")
        facts.append(TensorFacts(name, dtype, tuple(tensor.shape)))
    return safetensors_header(facts)


def _parts(header: bytes, tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """Yields the bytes of a safetensors file. A tensor on another device is copied when its turn comes."""
    yield memoryview(header)
    for tensor in tensors.values():
        if tensor.numel():
            yield (tensor.detach().cpu().contiguous().view(torch.uint8).flatten().numpy().data)

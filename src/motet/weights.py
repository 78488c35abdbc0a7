"""Sends new weights from a trainer to a running server.

    from motet import weights

    weights.push("http://127.0.0.1:8000", model.named_parameters(), version="1")

The tensors become one safetensors file. If the server runs on the same machine as the same user, the file is in memory
(a temporary file on a system without files in memory), and the server opens it; else it is the body of a request. The
server must have been started with `--rl`.

`push_adapter` sends a LoRA adapter in the same two ways. It does not need `--rl`:

    weights.push_adapter("http://127.0.0.1:8000", peft_model, name="policy", version="1")"""

import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

import torch

from motet.models.adapter_file import CONFIG_KEY
from motet.models.checkpoint import TensorFacts, safetensors_header
from motet.models.memory_file import MemoryFile
from motet.settings.server_url import is_http_url, without_v1

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
"""The name of each dtype in safetensors files."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
TIMEOUT_S = 600.0
BUSY_CODE = "overloaded"
"""Code of the error of a server that has no memory for the tensors now, because it receives others."""

UNREADABLE_CODE = "invalid_value"
"""Code of the error of a server that cannot open a file."""
VERSION_HEADER = "x-motet-weight-version"
"""Header with the version of an adapter, percent-encoded."""

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
        self,
        message: str,
        *,
        status: int,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
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
    file, named = PushedFile(dict(named_tensors)), {} if version is None else {"weight_version": version}

    def order(path: str) -> Mapping[str, object]:
        return {"weight_file": path} | named

    if way is not Delivery.HTTP and (way is Delivery.MEMORY or target.url.hostname in LOOPBACK):
        try:
            return _unless_busy(lambda: _share(target, file, order=order), timeout_s=timeout_s)
        except PushError as error:
            if way is Delivery.MEMORY or error.param != "weight_file":
                raise  # otherwise, the server cannot open the memory of this process
    return _unless_busy(lambda: _send(target, file, query=named), timeout_s=timeout_s)


def push_adapter(
    server: str,
    adapter: "NamedTensors | PeftModel",
    *,
    name: str,
    config: Mapping[str, object] | None = None,
    version: str | None = None,
    admin_key: str | None = None,
    way: Delivery | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Loads a LoRA adapter on all engines of a server, or of a gateway's Motet workers, or replaces the adapter with
    this name, and returns its version. Requests select it with `model`; running groups continue with the new tensors.

    `adapter`: a model of PEFT with one adapter, or tensors with PEFT's names and a `config`, the content of
    `adapter_config.json`. `version`: by default the number of adapters that the server has loaded. `push` describes the
    other parameters and the errors."""
    if isinstance(adapter, PeftModel):
        tensors, config = _peft_parts(adapter)
    else:
        tensors = dict(adapter)
    if config is None:
        raise ValueError("tensors of an adapter need a config: the content of its adapter_config.json")
    target = Target.of(server, admin_key=admin_key, timeout_s=timeout_s, route="/v1/load_lora_adapter")
    text = json.dumps(config, default=sorted)  # PEFT's sets of module names
    named = {"lora_name": name} | ({} if version is None else {"weight_version": version})
    file = PushedFile(tensors, metadata={CONFIG_KEY: text})

    def order(path: str) -> Mapping[str, object]:
        return named | {"lora_path": path, "load_inplace": True}

    if way is not Delivery.HTTP and (way is Delivery.MEMORY or target.url.hostname in LOOPBACK):
        try:
            return _unless_busy(lambda: _share(target, file, order=order), timeout_s=timeout_s)
        except PushError as error:
            if way is Delivery.MEMORY or (error.param, error.code) != ("lora_path", UNREADABLE_CODE):
                raise  # otherwise, the server cannot open the memory of this process
    return _unless_busy(lambda: _send(target, file, query=named | {"load_inplace": "true"}), timeout_s=timeout_s)


@runtime_checkable
class PeftModel(Protocol):
    """The part of `peft.PeftModel` that is used here."""

    peft_config: Any
    """Configurations by the names of the adapters."""
    active_adapter: str

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]: ...


def _peft_parts(model: PeftModel) -> tuple[dict[str, torch.Tensor], Mapping[str, object]]:
    """Returns the tensors of the model's active adapter, with the names that they have in a folder of PEFT, and the
    adapter's configuration."""
    name = model.active_adapter
    config: Mapping[str, object] = model.peft_config[name].to_dict()
    infix = f".{name}."
    tensors = {
        key.replace(infix, "."): tensor
        for key, tensor in model.named_parameters()
        if ".lora_" in key and (infix in key or key.endswith(infix[:-1]))
    }
    return {key.removesuffix(infix[:-1]): tensor for key, tensor in tensors.items()}, config


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
    route: str

    @classmethod
    def of(cls, server: str, *, admin_key: str | None, timeout_s: float, route: str = "/update_weights") -> "Target":
        if not is_http_url(server):
            raise ValueError(f"'{server}' is not the URL of a server: expected http://HOST:PORT or https://HOST:PORT")
        headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
        return cls(urlsplit(without_v1(server)), headers, timeout_s, route)

    def post(self, query: Mapping[str, str], body: Iterable[memoryview], *, content_type: str, length: int) -> str:
        """Posts to the route, and returns the new version of the weights. Raises PushError."""
        make = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        connection = make(self.url.hostname or "", self.url.port, timeout=self.timeout_s)
        try:
            path = f"{self.url.path}{self.route}" + (f"?{urlencode(query)}" if query else "")
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
            version, retry_after = (response.getheader(name, "") for name in (VERSION_HEADER, "retry-after"))
            if response.status == http.HTTPStatus.OK and version:
                return unquote(version)
            return _version_in(response.status, response.read(), retry_after=retry_after)
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
        code=error.get("code"),
        retry_after_s=max(1.0, float(retry_after)) if busy else None,
    )


@dataclass(frozen=True)
class PushedFile:
    """A safetensors file, made from tensors on any device."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] | None = None

    def parts(self) -> tuple[int, Iterator[memoryview]]:
        """Returns the file's size, and its bytes. Raises ValueError for a tensor that the file cannot have."""
        header = safetensors_header(self._facts(), metadata=self.metadata)
        return len(header) + sum(tensor.nbytes for tensor in self.tensors.values()), self._parts(header)

    def _facts(self) -> Iterator[TensorFacts]:
        for name, tensor in self.tensors.items():
            if (dtype := DTYPES.get(tensor.dtype)) is None:
                raise ValueError(
                    f"tensor {name}: its dtype is {tensor.dtype}; {', '.join(map(str, DTYPES))} can be sent"
                )
            yield TensorFacts(name, dtype, tuple(tensor.shape))

    def _parts(self, header: bytes) -> Iterator[memoryview]:
        """Yields the bytes of the file. A tensor on another device is copied when its turn comes."""
        yield memoryview(header)
        for tensor in self.tensors.values():
            if tensor.numel():
                yield (tensor.detach().cpu().contiguous().view(torch.uint8).flatten().numpy().data)


def _share(target: Target, pushed: PushedFile, *, order: Callable[[str], Mapping[str, object]]) -> str:
    """Sends the path of a file in memory. `order`: returns the body of the request with this path."""
    size, parts = pushed.parts()
    file = MemoryFile.create(size)
    try:
        at = 0
        for part in parts:
            at = file.write(part, at)
        file.seal()
        body = json.dumps(order(str(file.path))).encode()
        return target.post({}, [memoryview(body)], content_type="application/json", length=len(body))
    finally:
        file.close()


def _send(target: Target, pushed: PushedFile, *, query: Mapping[str, str]) -> str:
    size, parts = pushed.parts()
    return target.post(query, parts, content_type="application/octet-stream", length=size)

"""Certificates of clients, certificates that change, and files that cannot be used."""

import asyncio
import logging
import os
import shutil
import signal
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from motet.deploy.tls.certificates import Certificates
from motet.errors import ConfigError
from motet.settings.tls_config import TlsConfig
from tests.deploy.listening import serving_https
from tests.deploy.tls.authority import Authority, openssl
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def client_at(port: int, tls: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=tls, timeout=PATIENCE_S)


async def name_of(port: int, tls: ssl.SSLContext) -> str:
    """Returns the name in the server's certificate, as a new connection shows it."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    return str(dict(pair for (pair,) in certificate["subject"])["commonName"])


async def test_a_client_needs_a_certificate_except_for_health(authority: Authority) -> None:
    certificates = Certificates(authority.config(ssl_ca_certs=authority.file))
    async with serving_https(app, certificates) as (_, port):
        async with client_at(port, authority.client()) as without:
            refused = await without.get("/v1/models")
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "client_certificate_required")
            assert (await without.get("/health")).status_code == 200
        async with client_at(port, authority.client(authority.sign("client"))) as client:
            assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_certificate_of_another_authority_ends_the_connection(
    authority: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    certificates = Certificates(authority.config(ssl_ca_certs=authority.file))
    tls = authority.client(Authority(tmp_path, "other").sign("stranger"))
    tls.maximum_version = version
    async with serving_https(app, certificates) as (server, port), client_at(port, tls) as stranger:
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            await stranger.get("/health")
        assert not server.server_state.tasks


async def test_a_changed_certificate_is_used_by_new_connections_and_open_ones_continue(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    config = authority.config("first")
    certificates = Certificates(config)
    async with serving_https(app, certificates) as (_, port), client_at(port, authority.client()) as client:
        assert (await client.get("/")).status_code == 200
        assert await name_of(port, authority.client()) == "first"
        assert config.ssl_certfile is not None and config.ssl_keyfile is not None
        for new, present in zip(authority.sign("second"), (config.ssl_certfile, config.ssl_keyfile), strict=True):
            shutil.copy(new, present)
        assert await name_of(port, authority.client()) == "first"
        certificates.reload()
        assert await name_of(port, authority.client()) == "second"
        assert (await client.get("/")).status_code == 200


async def test_an_authority_that_was_removed_is_not_trusted_after_a_reload(tmp_path: Path) -> None:
    authority, former = Authority(tmp_path), Authority(tmp_path, "former")
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(authority.file.read_text() + former.file.read_text())
    certificates = Certificates(authority.config(ssl_ca_certs=trusted))
    tls = authority.client(former.sign("client"))
    async with serving_https(app, certificates) as (_, port):
        async with client_at(port, tls) as client:
            assert (await client.get("/")).status_code == 200
        shutil.copy(authority.file, trusted)
        certificates.reload()
        async with client_at(port, tls) as client:
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await client.get("/")


async def test_sighup_reads_the_files_again_and_keeps_the_certificates_if_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    authority = Authority(tmp_path)
    config = authority.config("first")
    certificates = Certificates(config)
    assert config.ssl_certfile is not None and config.ssl_keyfile is not None
    async with serving_https(app, certificates) as (_, port), AsyncExitStack() as stack:
        stack.enter_context(certificates.reloaded_on_signal())
        new = authority.sign("second")
        shutil.copy(new[0], config.ssl_certfile)  # with the key of the first certificate
        await hang_up(caplog, "the certificates were not changed: --ssl-certfile")
        assert await name_of(port, authority.client()) == "first"
        shutil.copy(new[1], config.ssl_keyfile)
        await hang_up(caplog, "the certificates were read again")
        assert await name_of(port, authority.client()) == "second"


async def hang_up(caplog: pytest.LogCaptureFixture, logged: str) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    while logged not in caplog.text:  # noqa: ASYNC110  a signal handler logs
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssl_certfile": "none.pem", "ssl_keyfile": None}, "--ssl-certfile none.pem: cannot be used: No such file"),
        ({"ssl_keyfile": "empty.pem"}, "with --ssl-keyfile empty.pem: cannot be used"),
        ({"ssl_keyfile": "locked.key"}, "without a password"),
        ({"ssl_ca_certs": "empty.pem"}, "--ssl-ca-certs empty.pem: no certificates can be read from it"),
        ({"worker_ca_file": "none.pem"}, "--worker-ca-file none.pem: no certificates can be read from it"),
        ({"worker_cert_file": "empty.pem"}, "--worker-cert-file empty.pem: cannot be used"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_flag(
    settings: dict[str, Any], message: str, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = authority.config(**settings)
    monkeypatch.chdir(tmp_path)
    Path("empty.pem").touch()
    openssl("genpkey -algorithm ed25519 -aes256 -pass pass:secret -out locked.key")
    with pytest.raises(ConfigError) as refused:
        Certificates(config)
    assert message in refused.value.message


def test_without_files_there_is_no_tls() -> None:
    certificates = Certificates(TlsConfig())
    assert (certificates.for_clients, certificates.for_workers) == (None, None)

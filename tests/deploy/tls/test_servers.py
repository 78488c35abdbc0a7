"""Servers with TLS: a gateway with its worker, and a decode server with its prefill server, each with certificates."""

from pathlib import Path
from typing import Any

import pytest

from motet.deploy.tls.certificates import Certificates
from motet.engines.http import server_client
from motet.engines.remote import EngineServer
from motet.errors import EngineDiedError
from motet.settings.server_config import CellConfig
from motet.settings.tls_config import TlsConfig
from motet.testing.fake_engine import FakeLeases
from motet.types import Role
from tests.deploy.dying import Starter
from tests.deploy.gateways import RunningGateway, address
from tests.deploy.running import EXPECTED, Running, is_complete, texts
from tests.deploy.tls.authority import Authority

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def secured(authority: Authority, name: str) -> Certificates:
    """Returns the certificates of a server that accepts and shows certificates of the authority."""
    return Certificates(authority.config(name, ssl_ca_certs=authority.file))


def worker(authority: Authority, folder: Path, **settings: Any) -> Running:
    tls = authority.client(authority.sign("operator"))
    return Running(folder, certificates=secured(authority, "worker"), tls=tls, **settings)


async def test_a_gateway_and_its_worker_show_each_other_their_certificates(authority: Authority, folder: Path) -> None:
    async with worker(authority, folder) as server:
        assert address(server).startswith("https://")
        server.engine.let_run()
        tls = authority.client(authority.sign("operator"))
        async with RunningGateway(server, certificates=secured(authority, "gateway"), tls=tls) as gateway:
            assert texts((await gateway.chat()).text) == EXPECTED
            assert (await gateway.http.get("/status")).json()["workers"][0]["state"] == "ready"


async def test_a_gateway_of_plain_http_shows_its_certificate_to_its_worker(authority: Authority, folder: Path) -> None:
    certificate, key = authority.sign("gateway")
    config = TlsConfig(worker_ca_file=str(authority.file), worker_cert_file=str(certificate), worker_key_file=str(key))
    async with worker(authority, folder) as server:
        server.engine.let_run()
        async with RunningGateway(server, certificates=Certificates(config)) as gateway:
            assert gateway.serving.url.startswith("http://")
            assert texts((await gateway.chat()).text) == EXPECTED


async def test_a_gateway_without_a_certificate_does_not_use_the_worker_and_says_why(
    authority: Authority, folder: Path
) -> None:
    config = TlsConfig(worker_ca_file=str(authority.file))
    async with worker(authority, folder) as server, Running(folder) as plain:
        plain.engine.let_run()
        async with RunningGateway(plain, server, certificates=Certificates(config)) as gateway:
            shown = (await gateway.http.get("/status")).json()["workers"]
            assert [one["state"] for one in shown] == ["ready", "dead"]
            assert "requires a client certificate" in shown[1]["note"]
            assert "--worker-cert-file" in shown[1]["note"]
            assert is_complete((await gateway.chat()).text)


async def test_a_worker_whose_certificate_is_not_trusted_gets_no_request(
    authority: Authority, folder: Path, tmp_path: Path
) -> None:
    tls = Certificates(TlsConfig(worker_ca_file=str(Authority(tmp_path).file))).for_workers
    async with worker(authority, folder) as server, server_client(tls=tls) as client:
        with pytest.raises(EngineDiedError, match="its certificate cannot be trusted"):
            await EngineServer(address(server), client).report()


async def test_the_hop_from_decode_to_prefill_is_encrypted_and_shows_certificates(
    authority: Authority, folder: Path
) -> None:
    leases = FakeLeases()
    async with worker(authority, folder, role=Role.PREFILL, starter=Starter(leases=leases)) as prefill:
        cell = CellConfig(prefill_urls=(address(prefill),), bypass_tokens=0)
        decode = worker(authority, folder, role=Role.DECODE, cell=cell, starter=Starter(leases=leases))
        async with decode:
            await decode.engine.has_connected.wait()
            decode.engine.let_run()
            assert is_complete((await decode.chat()).text)
            assert (len(prefill.engine.prefills), decode.engine.record.pulls) == (1, 1)

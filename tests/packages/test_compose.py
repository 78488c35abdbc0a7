"""`deploy/docker/compose.yaml`: its form, its secrets, and its services, each run on a host of its own.

`compose_schema.json` is the schema of the Compose Specification (compose-spec/compose-spec, Apache-2.0).
"""

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml  # type: ignore[import-untyped]

from motet.deploy.child import ChildServer
from motet.settings.server_config import environment
from tests.forked import ForkingProcess
from tests.hosts.network import Host, NoNetwork, hosts
from tests.packages.conftest import ROOT
from tests.packages.dockerfile import instructions
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY

FILE = ROOT / "deploy" / "docker" / "compose.yaml"
SCHEMA = Path(__file__).parent / "compose_schema.json"
PORT = 8000
SECRETS = {"MOTET_API_KEYS": "of-clients", "MOTET_WORKER_KEY": "of-workers", "MOTET_CLUSTER_KEY": "of the cluster"}
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
N = 4


def services(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the services with their variables replaced. Raises KeyError if a required variable is missing."""

    def value(match: re.Match[str]) -> str:
        name, sign, default = match.groups()
        return environ.get(name) or default if sign == "-" else environ[name]

    found: dict[str, Any] = yaml.safe_load(VARIABLE.sub(value, FILE.read_text()))["services"]
    return found


def test_the_file_has_the_form_of_the_specification() -> None:
    jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate(yaml.safe_load(FILE.read_text()))


def test_there_are_a_gateway_a_prefill_and_two_decode_servers() -> None:
    commands = {name: one["command"] for name, one in services(SECRETS).items()}
    roles = [command[command.index("--role") + 1] for command in commands.values() if "--role" in command]
    assert (sorted(roles), commands["gateway"][0]) == (["decode", "decode", "prefill"], "gateway")


@pytest.mark.parametrize("missing", SECRETS)
def test_secrets_come_from_the_environment_and_are_required(missing: str) -> None:
    with pytest.raises(KeyError, match=missing):
        services({name: value for name, value in SECRETS.items() if name != missing})


def test_only_the_gateway_gets_the_admin_key_and_needs_none() -> None:
    for environ, key in ((SECRETS, ""), ({**SECRETS, "MOTET_ADMIN_KEY": "boss"}, "boss")):
        found = {name: one.get("environment", {}).get("MOTET_ADMIN_KEY") for name, one in services(environ).items()}
        assert {name: value for name, value in found.items() if value is not None} == {"gateway": key}


def test_services_have_minimal_rights_and_only_the_gateway_is_published() -> None:
    for name, service in services(SECRETS).items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and "user" not in service
        assert "privileged" not in service and "no-new-privileges:true" in service["security_opt"]
        assert service.get("ports", []) == (["127.0.0.1:8000:8000"] if name == "gateway" else [])


def test_every_server_keeps_the_health_check_of_the_image() -> None:
    image = [one.word for one in instructions((FILE.parent / "Dockerfile").read_text())]
    assert "HEALTHCHECK" in image
    assert [name for name, service in services(SECRETS).items() if "healthcheck" in service] == ["model"]


@contextmanager
def named(network: Mapping[str, Host]) -> Iterator[None]:
    """Lets each host resolve the names of the others, as in a network of containers."""
    lines = ["127.0.0.1 localhost", *(f"{host.address} {name}" for name, host in network.items())]
    with ExitStack() as stack:
        for host in network.values():
            folder = Path("/etc/netns") / host.namespace  # `ip netns exec` mounts its files over the files in /etc
            folder.mkdir(parents=True)
            stack.callback(folder.rmdir)
            (folder / "hosts").write_text("\n".join(lines) + "\n")
            stack.callback((folder / "hosts").unlink)
        yield


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.hosts
def test_the_services_serve_a_group_with_one_transfer(folder: Path, forking: ForkingProcess) -> None:
    """Each service runs with its own command and environment; only the model is different."""
    defined = services({**SECRETS, "MOTET_MODEL": str(folder)})
    defined.pop("model")
    with ExitStack() as stack:
        try:
            network = stack.enter_context(hosts(*defined))
        except NoNetwork as error:
            pytest.skip(f"network namespaces cannot be created here: {error}")
        stack.enter_context(named(network))
        *engines, gateway = (server(service, host=network[name], forking=forking) for name, service in defined.items())
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(stack.enter_context, engines))
        stack.enter_context(gateway)  # after the others, as in `depends_on`
        with network["gateway"].entered():
            client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=PATIENCE_S))
            client.headers["Authorization"] = f"Bearer {SECRETS['MOTET_API_KEYS']}"
            check(client)


def server(service: Mapping[str, Any], *, host: Host, forking: ForkingProcess) -> ChildServer:
    command, *arguments = service["command"]
    tiny = {"serve": TINY, "gateway": ()}[command]
    environ = {**environment(), **service["environment"]}
    return forking.server([*arguments, *tiny], command=command, port=PORT, environ=environ, under=host.under)


def check(client: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "words " * 60, "n": N, "max_tokens": 4, "seed": 1, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(N))
    status = client.get("/status").json()
    assert sorted(worker["role"] for worker in status["workers"]) == ["decode", "decode", "prefill"]
    assert (status["totals"]["prefills"], status["totals"]["transfers"]) == (1, 1)
    assert client.post("/v1/completions", json=body, headers={"Authorization": "Bearer other"}).status_code == 401

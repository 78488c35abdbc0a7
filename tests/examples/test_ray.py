"""The examples for Ray: nothing is started, but the programs that read the files accept every file."""

import copy
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

from motet.cli.main import app
from motet.settings.declaration import ServerCommand
from motet.settings.named_worker import resources_by_role
from motet.settings.record import Settings
from motet.settings.resolve import resolve_settings
from motet.settings.server_config import SETTINGS
from tests.examples.test_examples import EXAMPLES

KEYS = {"MOTET_API_KEYS": "k"}
EXAMPLE = EXAMPLES / "ray"
SCHEMA = Path(__file__).with_name("rayservice_schema.json")

Document = dict[str, Any]

SERVE = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
for config in yaml.safe_load_all(sys.stdin):
    print(ServeDeploySchema.model_validate(config).model_dump_json(exclude_unset=True))
"""
"""A program that reads configs as Serve does, in a process of its own, since Ray logs warnings when it is imported."""


def printed(command: str) -> str:
    """Returns the output of `motet ...`."""
    program, *arguments = shlex.split(command)
    assert program == "motet"
    result = CliRunner(env=KEYS).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def command_in(lines: list[str]) -> str:
    """Returns a command in comments, which can continue on the next line."""
    comments = [line.strip().removeprefix("#").strip() for line in lines]
    first = next(at for at, line in enumerate(comments) if line.startswith("motet ray"))
    command = comments[first]
    for line in comments[first + 1 :]:
        if not command.endswith("\\"):
            break
        command = command.removesuffix("\\") + line
    return command


def closed(schema: Any) -> Any:
    """Makes a schema refuse unknown fields, which Kubernetes would drop silently."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: closed(part) for name, part in schema.items()}
    return (
        {**parts, "additionalProperties": False}
        if isinstance(schema.get("type"), str) and "properties" in parts
        else parts
    )


@pytest.fixture(scope="module")
def validator() -> Any:
    """Validates a RayService."""
    schema = closed(json.loads(SCHEMA.read_text()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture
def service() -> Document:
    return cast(Document, yaml.safe_load((EXAMPLE / "rayservice.yaml").read_text()))


def groups_of(service: Document) -> list[Document]:
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pods_of(service: Document) -> list[Document]:
    return [group["template"]["spec"] for group in groups_of(service)]


def args_in(config: Document) -> dict[str, object]:
    """Returns the arguments of the only application."""
    (application,) = config["applications"]
    assert application["import_path"] == "motet.deploy.ray.app:application"
    return cast(dict[str, object], application["args"])


def settings_in(config: Document) -> Settings:
    return resolve_settings(args_in(config), environ=KEYS, command=ServerCommand.RAY)


def test_the_config_equals_the_output_of_its_command() -> None:
    text = (EXAMPLE / "motet.yaml").read_text()
    command = command_in((EXAMPLE / "README.md").read_text().splitlines())
    assert text == printed(command.partition(" > ")[0])
    cell = settings_in(yaml.safe_load(text)).cell
    assert (cell.prefill, cell.decode) == (1, 2)


def test_the_service_has_the_config_that_its_command_prints(service: Document) -> None:
    lines = (EXAMPLE / "rayservice.yaml").read_text().splitlines()
    inside = service["spec"]["serveConfigV2"]
    assert [line for line in printed(command_in(lines)).splitlines() if not line.startswith("#")] == inside.splitlines()
    settings_in(yaml.safe_load(inside))


@pytest.mark.long
@pytest.mark.slow
def test_serve_knows_every_field_of_the_configs(service: Document) -> None:
    """Serve drops unknown fields, so the parsed config must equal the file."""
    texts = [(EXAMPLE / "motet.yaml").read_text(), service["spec"]["serveConfigV2"]]
    command = (sys.executable, "-c", SERVE)
    read = subprocess.run(command, input="\n---\n".join(texts), capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    assert [json.loads(line) for line in read.stdout.splitlines()] == [yaml.safe_load(text) for text in texts]


@pytest.mark.slow
def test_the_service_follows_the_operator_s_schema(service: Document, validator: Any) -> None:
    assert [error.message for error in validator.iter_errors(service)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ((), "serveConfig", "applications: []"),
        (("rayClusterConfig",), "workerGroupSpec", []),
        (("rayClusterConfig", "workerGroupSpecs", 0), "replicas", "one"),
        (("rayClusterConfig", "workerGroupSpecs", 0, "template", "spec"), "enableServiceLink", False),
        (("rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0), "environment", []),
        (("rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0), "env", [{"value": "nameless"}]),
        (("rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0, "ports", 0), "port", 8000),
        (("rayClusterConfig", "headGroupSpec", "rayStartParams"), "num-cpus", 0),
    ],
)
def test_a_mistake_in_the_service_would_be_found(
    where: tuple[str | int, ...], name: str, value: object, service: Document, validator: Any
) -> None:
    broken = copy.deepcopy(service["spec"])
    part = broken
    for step in where:
        part = part[step]
    part[name] = value
    assert not validator.is_valid({**service, "spec": broken})


def test_each_kind_of_replica_finds_its_nodes(service: Document) -> None:
    """A replica requests a resource that its nodes have, and there are as many nodes as replicas."""
    settings = settings_in(yaml.safe_load(service["spec"]["serveConfigV2"]))
    replicas = {"prefill": settings.cell.prefill, "decode": settings.cell.decode}
    groups = {group["groupName"]: group for group in groups_of(service)[1:]}
    for role, resources in resources_by_role(settings.ray.resources_of).items():
        group = groups[role]
        assert {name: float(amount) for name, amount in group["resources"].items()} == resources
        assert group["replicas"] == group["minReplicas"] == replicas[role]
        (container,) = group["template"]["spec"]["containers"]
        assert float(container["resources"]["limits"]["cpu"]) >= settings.ray.cpus_per_worker
    assert groups.keys() == replicas.keys()


def test_keys_come_from_a_secret_in_every_pod_and_are_nowhere_else(service: Document) -> None:
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert not any(SETTINGS[name].secret for name in args_in(config))
    for pod in pods_of(service):
        environ = {variable["name"]: variable for variable in pod["containers"][0]["env"]}
        for name in ("MOTET_CLUSTER_KEY", "MOTET_API_KEYS"):
            assert environ[name]["valueFrom"]["secretKeyRef"]["name"] == "motet-keys"
        resolve_settings(
            {}, environ={name: "a" for name in environ if name.startswith("MOTET_")}, command=ServerCommand.RAY
        )


def test_services_of_kubernetes_do_not_become_settings(service: Document) -> None:
    assert [pod["enableServiceLinks"] for pod in pods_of(service)] == [False, False, False]


def test_all_pods_have_one_image_with_the_ray_version_that_is_tested(service: Document) -> None:
    assert len({pod["containers"][0]["image"] for pod in pods_of(service)}) == 1
    tested = f"ray[serve]>={service['spec']['rayClusterConfig']['rayVersion']}"
    assert tested in (EXAMPLES.parent / "pyproject.toml").read_text()


def test_the_port_of_serve_is_that_of_the_pods(service: Document) -> None:
    port = yaml.safe_load(service["spec"]["serveConfigV2"])["http_options"]["port"]
    for pod in pods_of(service):
        (container,) = pod["containers"]
        assert {"name": "serve", "containerPort": port} in container["ports"]

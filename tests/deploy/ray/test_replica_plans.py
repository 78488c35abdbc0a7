"""The plan of each replica, from the application's settings and the place where the replica runs."""

from pathlib import Path

import pytest

from motet.deploy.gateway_models import TokenizerRules
from motet.deploy.ray.replica_plans import (
    ReplicaPlace,
    engine_key,
    gateway_replica_plan,
    serves_clients,
    worker_plan,
    worker_role,
)
from motet.deploy.ray.worker import WorkerPlan
from motet.deploy.server_plan import GatewayPlan, engine_configs
from motet.errors import ConfigError, ModelLoadError
from motet.settings.declaration import ServerCommand
from motet.settings.record import Settings
from motet.settings.resolve import resolve_settings
from motet.text.formats import ParserNames
from motet.types import Role
from tests.models.model_folders import write_model
from tests.tiny_tokenizer import save_tiny_tokenizer

PLACE = ReplicaPlace("decode-abc", "10.0.0.7", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(write_model(tmp_path_factory.mktemp("models") / "model"))


def settings(model: Path, environ: dict[str, str] | None = None, **flags: object) -> Settings:
    return resolve_settings(
        {"model": str(model), "cluster_key": "of the cell", **flags}, environ=environ or {}, command=ServerCommand.RAY
    )


def plan_of(settings: Settings, role: Role, place: ReplicaPlace = PLACE) -> WorkerPlan:
    return worker_plan(settings, role, place=place, environ={})


def gateway_of(settings: Settings) -> GatewayPlan:
    return gateway_replica_plan(settings, ReplicaPlace("gateway-abc", "10.0.0.7", 0), environ={})


def test_decode_replicas_have_both_roles_if_there_is_no_prefill(model: Path) -> None:
    assert worker_role(settings(model)) is Role.BOTH
    assert worker_role(settings(model, decode=3)) is Role.BOTH
    assert worker_role(settings(model, prefill=1, decode=1)) is Role.DECODE


def test_a_worker_has_one_engine_and_a_server_on_its_node(model: Path) -> None:
    plan = plan_of(settings(model, prefill=2, decode=3, served_model_name="mine"), Role.DECODE)
    assert plan.ports[0] == 22002
    ((id, engine),) = engine_configs(plan.server, cores=8).items()
    assert id == "decode-abc"
    assert (engine.role, engine.model_path, engine.model_name) == (Role.DECODE, str(model), "mine")
    assert (engine.side_channel_host, engine.cluster_key) == ("10.0.0.7", "of the cell")
    server = plan.server.server
    assert (server.host, server.port, server.served_model_name) == ("10.0.0.7", 0, "mine")
    events = plan.server.kv_events
    assert (events.kv_events_port, events.kv_events_host) == (0, "10.0.0.7")


def test_a_configured_side_channel_address_takes_precedence_over_the_nodes(model: Path) -> None:
    """A node can have a fast network in addition to the one that Ray uses, named in the node's environment."""
    environ = {"MOTET_SIDE_CHANNEL_HOST": "192.168.0.7"}
    for chosen in (settings(model, side_channel_host="192.168.0.7"), settings(model, environ)):
        plan = plan_of(chosen, Role.PREFILL)
        assert plan.server.engine.side_channel_host == "192.168.0.7"
        assert plan.server.server.host == "10.0.0.7"
    loopback = settings(model, side_channel_host="127.0.0.1")
    assert plan_of(loopback, Role.PREFILL).server.engine.side_channel_host == "127.0.0.1"


def test_an_engine_has_as_many_threads_as_cpus_are_reserved_for_it(model: Path) -> None:
    def threads(**flags: object) -> int | None:
        return plan_of(settings(model, None, **flags), Role.BOTH).server.engine.num_threads

    assert (threads(), threads(cpus_per_worker=3.5), threads(cpus_per_worker=0.1)) == (1, 4, 1)
    assert threads(cpus_per_worker=8.0, num_threads=2) == 2


def test_a_replica_reads_the_session_header_of_its_node_s_proxy(model: Path) -> None:
    environ = {"RAY_SERVE_SESSION_ID_HEADER_KEY": "x-correlation-id"}
    chosen = settings(model, None, session_headers=["x-talk"])
    expected = ("x-talk", "x-correlation-id")
    for role in Role:
        assert worker_plan(chosen, role, place=PLACE, environ=environ).server.server.session_headers == expected
    assert gateway_replica_plan(chosen, PLACE, environ=environ).server.session_headers == expected
    assert gateway_of(chosen).server.session_headers == ("x-talk",)


def test_only_replicas_that_serve_clients_accept_their_keys(model: Path) -> None:
    direct = settings(model, ingress="direct", prefill=1, decode=1, api_keys=["client"])
    gateways = settings(model, prefill=1, decode=1, api_keys=["client"])
    assert plan_of(direct, Role.DECODE).server.server.api_keys == ("client",)
    assert plan_of(direct, Role.PREFILL).server.server.api_keys == ("of the cell",)
    assert plan_of(gateways, Role.DECODE).server.server.api_keys == ("of the cell",)
    assert gateway_of(gateways).server.api_keys == ("client",)
    assert (
        gateway_of(gateways).server.worker_key == plan_of(direct, Role.DECODE).server.server.worker_key == "of the cell"
    )
    assert [serves_clients(direct, role) for role in (Role.PREFILL, Role.DECODE, Role.BOTH)] == [False, True, True]
    assert not any(serves_clients(gateways, role) for role in Role)


def test_blocks_are_published_only_if_they_are_followed(model: Path) -> None:
    """Published events contain the tokens of prompts, and every program that reaches the port can read them."""

    def publishes(role: Role, **flags: object) -> bool:
        plan = plan_of(settings(model, None, prefill=1, decode=1, **flags), role)
        return plan.server.kv_events.kv_events_port is not None

    assert publishes(Role.PREFILL)
    assert publishes(Role.DECODE)
    assert publishes(Role.PREFILL, ingress="direct")
    assert not publishes(Role.DECODE, ingress="direct")
    assert not publishes(Role.PREFILL, prefix_cache=False)


def test_without_a_cluster_key_replicas_require_no_key(model: Path) -> None:
    """The application always generates a key; this plan is made without it."""
    without_key = settings(model, cluster_key="")
    assert engine_key(without_key) == ""
    assert plan_of(without_key, Role.BOTH).server.server.api_keys == ()
    assert gateway_of(without_key).server.worker_key == ""


def test_a_gateway_uses_the_settings_of_routing(model: Path) -> None:
    plan = gateway_of(
        settings(model, routing_policy="session", bypass_tokens=7, worker_timeout_s=9.0, served_model_name="mine")
    )
    assert (plan.routing.routing_policy, plan.cell.bypass_tokens) == ("session", 7)
    assert (plan.gateway.worker_timeout_s, plan.gateway.workers) == (9.0, ())
    assert (plan.server.served_model_name, plan.server.port) == ("mine", 0)
    assert plan.tokenizers == TokenizerRules({})


def test_a_gateway_listens_on_its_node_if_serve_can_be_reached_there(model: Path) -> None:
    assert gateway_of(settings(model)).server.host == "127.0.0.1"
    assert gateway_of(settings(model, host="0.0.0.0", insecure=True)).server.host == "10.0.0.7"


def test_a_gateway_needs_no_model_but_can_have_a_tokenizer(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    plan = gateway_of(
        settings(
            Path("./not/here"),
            tokenizer=str(model),
            chat_template=str(template),
            tool_parser="none",
            served_model_name="mine",
        )
    )
    parsers = ParserNames(tools="none")
    assert plan.tokenizers == TokenizerRules({}, others=model, chat_template="{{ messages }}", parsers=parsers)


def test_an_error_names_the_file_that_is_missing_on_the_node(model: Path) -> None:
    with pytest.raises(ModelLoadError, match="not/here"):
        plan_of(settings(Path("./not/here")), Role.BOTH)
    with pytest.raises(ConfigError, match="--chat-template /gone"):
        gateway_of(settings(model, chat_template="/gone"))

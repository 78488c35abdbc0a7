"""The plan of each replica, by the application's settings and the place where the replica runs."""

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


def test_decode_replicas_do_it_all_where_there_are_none_for_prefill(model: Path) -> None:
    assert worker_role(settings(model)) is Role.BOTH
    assert worker_role(settings(model, decode=3)) is Role.BOTH
    assert worker_role(settings(model, prefill=1, decode=1)) is Role.DECODE


def test_a_worker_is_one_engine_and_a_server_on_its_node(model: Path) -> None:
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


def test_an_address_for_the_side_channel_wins_over_the_node_s(model: Path) -> None:
    """A node may have a fast network beside the one that Ray knows; each node names it in its environment."""
    there = {"MOTET_SIDE_CHANNEL_HOST": "192.168.0.7"}
    for chosen in (settings(model, side_channel_host="192.168.0.7"), settings(model, there)):
        plan = plan_of(chosen, Role.PREFILL)
        assert plan.server.engine.side_channel_host == "192.168.0.7"
        assert plan.server.server.host == "10.0.0.7"
    loopback = settings(model, side_channel_host="127.0.0.1")
    assert plan_of(loopback, Role.PREFILL).server.engine.side_channel_host == "127.0.0.1"


def test_an_engine_has_as_many_threads_as_cpus_are_kept_for_it(model: Path) -> None:
    def threads(**flags: object) -> int | None:
        return plan_of(settings(model, None, **flags), Role.BOTH).server.engine.num_threads

    assert (threads(), threads(cpus_per_worker=3.5), threads(cpus_per_worker=0.1)) == (1, 4, 1)
    assert threads(cpus_per_worker=8.0, num_threads=2) == 2


def test_only_replicas_that_serve_clients_take_their_keys(model: Path) -> None:
    direct = settings(model, ingress="direct", prefill=1, decode=1, api_keys=["client"])
    behind = settings(model, prefill=1, decode=1, api_keys=["client"])
    assert plan_of(direct, Role.DECODE).server.server.api_keys == ("client",)
    assert plan_of(direct, Role.PREFILL).server.server.api_keys == ("of the cell",)
    assert plan_of(behind, Role.DECODE).server.server.api_keys == ("of the cell",)
    assert gateway_of(behind).server.api_keys == ("client",)
    assert (
        gateway_of(behind).server.worker_key == plan_of(direct, Role.DECODE).server.server.worker_key == "of the cell"
    )
    assert [serves_clients(direct, role) for role in (Role.PREFILL, Role.DECODE, Role.BOTH)] == [False, True, True]
    assert not any(serves_clients(behind, role) for role in Role)


def test_blocks_are_published_only_where_somebody_follows_them(model: Path) -> None:
    """Published events hold the tokens of prompts, and anybody can read them."""

    def tells(role: Role, **flags: object) -> bool:
        plan = plan_of(settings(model, None, prefill=1, decode=1, **flags), role)
        return plan.server.kv_events.kv_events_port is not None

    assert tells(Role.PREFILL)
    assert tells(Role.DECODE)
    assert tells(Role.PREFILL, ingress="direct")
    assert not tells(Role.DECODE, ingress="direct")
    assert tells(Role.DECODE, ingress="direct", prefix_router=True)
    assert not tells(Role.PREFILL, prefix_cache=False)


def test_without_keys_everybody_may_ask(model: Path) -> None:
    """The application always makes a key; this replica was made without it."""
    open_to_all = settings(model, cluster_key="")
    assert engine_key(open_to_all) == ""
    assert plan_of(open_to_all, Role.BOTH).server.server.api_keys == ()
    assert gateway_of(open_to_all).server.worker_key == ""


def test_a_gateway_goes_by_the_settings_of_routing(model: Path) -> None:
    plan = gateway_of(
        settings(model, routing_policy="session", bypass_tokens=7, worker_timeout_s=9.0, served_model_name="mine")
    )
    assert (plan.routing.routing_policy, plan.cell.bypass_tokens) == ("session", 7)
    assert (plan.gateway.worker_timeout_s, plan.gateway.workers) == (9.0, ())
    assert (plan.server.served_model_name, plan.server.port) == ("mine", 0)
    assert plan.tokenizers == TokenizerRules({})


def test_a_gateway_is_reached_on_its_node_if_serve_is(model: Path) -> None:
    assert gateway_of(settings(model)).server.host == "127.0.0.1"
    assert gateway_of(settings(model, host="0.0.0.0", insecure=True)).server.host == "10.0.0.7"


def test_a_gateway_needs_no_model_but_may_have_another_tokenizer(model: Path, tmp_path: Path) -> None:
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


def test_an_error_names_the_file_that_the_node_lacks(model: Path) -> None:
    with pytest.raises(ModelLoadError, match="not/here"):
        plan_of(settings(Path("./not/here")), Role.BOTH)
    with pytest.raises(ConfigError, match="--chat-template /gone"):
        gateway_of(settings(model, chat_template="/gone"))

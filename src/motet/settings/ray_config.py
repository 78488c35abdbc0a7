"""The settings of a cell on Ray, declared in the manner of `motet.settings.server_config`."""

from dataclasses import dataclass
from enum import StrEnum

from motet.settings.declaration import NOT_BLANK, PORT, common, setting
from motet.settings.named_worker import resources_by_role


class Ingress(StrEnum):
    """The replicas that hold the streams of clients on Ray Serve."""

    GATEWAY = "gateway"
    """Separate gateway replicas: a group outlives the worker that generates it."""
    DIRECT = "direct"
    """The decode replicas: tokens pass one hop less, and a stream ends with its replica."""


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The replicas of a cell on Ray Serve: how many there are, and where they run."""

    ingress: Ingress = setting(
        Ingress.GATEWAY,
        "Replicas that hold clients' streams: gateway replicas, so that a stream outlives its worker, or decode "
        "replicas (direct), with one hop less.",
    )
    gateways: int = common(1, "Number of gateway replicas.", minimum=1)
    autoscale: bool = common(False, "Scale the number of prefill and decode replicas with the load.")
    min_prefill: int = setting(0, "Minimum number of prefill replicas, with --autoscale.", minimum=0)
    min_decode: int = setting(1, "Minimum number of decode replicas, with --autoscale.", minimum=1)
    choices_per_decode: int = setting(
        64, "Target number of open choices per decode replica, with --autoscale.", minimum=1
    )
    prompts_per_prefill: int = setting(
        4, "Target number of running prompts per prefill replica, with --autoscale.", minimum=1
    )
    scale_up_delay_s: float = setting(5.0, "Time above the target load before a replica is added.", minimum=0)
    scale_down_delay_s: float = setting(
        60.0, "Time below the target load before a replica is removed; five times as long for the last one.", minimum=0
    )
    cpus_per_worker: float = common(
        1.0, "CPUs that Ray reserves for each prefill and decode replica, and threads of its engine.", above=0
    )
    gpus_per_worker: float = common(
        0.0,
        "GPUs that Ray reserves for each prefill and decode replica; with a fraction, replicas share one.",
        minimum=0,
        maximum=1,
        reason="an engine uses one GPU",
    )
    resources_of: tuple[str, ...] = setting(
        (),
        "Custom Ray resource that each replica of a role requires: ROLE=NAME:AMOUNT with the role prefill, decode or "
        "gateway; repeatable.",
        read=resources_by_role,
    )
    prefill_port: int = setting(
        20000, "Side-channel port of the first prefill replica; the next one has the next port.", **PORT
    )
    decode_port: int = setting(
        22000, "Side-channel port of the first decode replica; the next one has the next port.", **PORT
    )
    ray_address: str | None = common(
        None,
        "Cluster to join: auto or HOST:PORT; local starts a cluster.",
        unset="a running cluster, or else a new one",
    )
    app_name: str = setting("motet", "Name of the Serve application.", pattern=NOT_BLANK, must="not empty")

"""The settings of a cell on Ray, declared as those in `motet.settings.server_config` are."""

from dataclasses import dataclass

from motet.settings.declaration import NOT_BLANK, PORT, setting
from motet.settings.named_worker import resources_by_role
from motet.types import Ingress


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The replicas of a cell on Ray Serve: how many there are, and where they run."""

    ingress: Ingress = setting(
        Ingress.GATEWAY,
        "Who holds clients' streams: gateway replicas, so that a stream outlives its worker, or, without that hop, "
        "the decode replicas (direct).",
    )
    gateways: int = setting(1, "Number of gateway replicas.", least=1)
    autoscale: bool = setting(False, "Run as many prefill and decode replicas as the load needs.")
    min_prefill: int = setting(0, "Fewest prefill replicas, with --autoscale.", least=0)
    min_decode: int = setting(1, "Fewest decode replicas, with --autoscale.", least=1)
    choices_per_decode: int = setting(
        64, "Open choices that one decode replica should have, with --autoscale.", least=1
    )
    prompts_per_prefill: int = setting(
        4, "Running prompts that one prefill replica should have, with --autoscale.", least=1
    )
    scale_up_delay_s: float = setting(5.0, "Time of more load before a replica is added.", least=0)
    scale_down_delay_s: float = setting(
        60.0, "Time of less load before a replica ends; the last one ends after five times as long.", least=0
    )
    cpus_per_worker: float = setting(
        1.0, "CPUs that Ray keeps for each prefill and decode replica, and threads of its engine.", above=0
    )
    gpus_per_worker: float = setting(
        0.0,
        "GPUs that Ray keeps for each prefill and decode replica; a fraction lets replicas share one.",
        least=0,
        most=1,
        because="an engine uses one GPU",
    )
    resources_of: tuple[str, ...] = setting(
        (),
        "Custom resource of Ray that each replica of a role wants: ROLE=NAME:AMOUNT with the role prefill, decode or "
        "gateway; several times.",
        read=resources_by_role,
    )
    prefill_port: int = setting(
        20000, "Side-channel port of the first prefill replica; the next one has the next port.", **PORT
    )
    decode_port: int = setting(
        22000, "Side-channel port of the first decode replica; the next one has the next port.", **PORT
    )
    ray_address: str | None = setting(
        None,
        "Cluster to join: auto, HOST:PORT, or local, which starts one.",
        unset="the cluster that is there, or a new one",
    )
    app_name: str = setting("motet", "Name of the Serve application.", pattern=NOT_BLANK, must="not empty")
    prefix_router: bool = setting(
        False, "With direct ingress behind HAProxy, choose replicas by cached prefix too, through a hook inside Ray."
    )

"""The rules about a cell on Ray Serve."""

import math
from collections.abc import Iterable

from motet.config import RayConfig
from motet.errors import ConfigError
from motet.settings.rule import Proposal, Rule
from motet.types import Ingress, Role

GATEWAY = "gateway"
ROLES = (Role.PREFILL.value, Role.DECODE.value, GATEWAY)
"""Kinds of replicas that can be given resources."""
RESOURCE = f"ROLE=NAME:AMOUNT, such as decode=h100:1; a role is one of {', '.join(ROLES)}"
MAX_PORT = 65535


def resources_by_role(texts: Iterable[str]) -> dict[str, dict[str, float]]:
    """Of `ROLE=NAME:AMOUNT` each. Raises ConfigError."""
    found: dict[str, dict[str, float]] = {}
    for text in texts:
        role, _, resource = text.partition("=")
        name, colon, amount = resource.rpartition(":")
        try:
            wanted = float(amount)
        except ValueError:
            wanted = 0.0
        if role not in ROLES or not (colon and name) or not 0 < wanted < math.inf:
            raise ConfigError(f"{text!r} is not {RESOURCE}")
        found.setdefault(role, {})[name] = wanted
    return found


def bases_apart(proposal: Proposal) -> bool:
    """Whether no rank of one role has the port of a rank of the other."""
    ray, cell = proposal.ray, proposal.cell
    lower, upper = sorted(((ray.prefill_port, cell.prefill), (ray.decode_port, cell.decode)))
    return 0 in (ray.prefill_port, ray.decode_port) or upper[0] - lower[0] >= lower[1] * devices_of(ray)


def last_port(first: int, replicas: int, ray: RayConfig) -> int:
    """Of the replica with the highest rank; 0 where any free one will do."""
    return first + (max(1, replicas) - 1) * devices_of(ray) if first else 0


def devices_of(ray: RayConfig) -> int:
    """Of one replica: so far apart are the ports of two ranks."""
    return max(1, math.ceil(ray.gpus_per_worker))


def _resources_fit(proposal: Proposal) -> bool:
    try:
        resources_by_role(proposal.ray.resources_of)
    except ConfigError:
        return False
    return True


RAY_RULES = (
    Rule(("gateways",), "must be at least 1", lambda p: p.ray.gateways >= 1),
    Rule(("min_prefill",), "must be 0 or more", lambda p: p.ray.min_prefill >= 0),
    Rule(("min_decode",), "must be at least 1", lambda p: p.ray.min_decode >= 1),
    Rule(
        ("min_prefill", "prefill"),
        "--prefill is the most there may be: at least as many as --min-prefill",
        lambda p: p.ray.min_prefill <= p.cell.prefill,
    ),
    Rule(
        ("min_decode", "decode"),
        "--decode is the most there may be: at least as many as --min-decode",
        lambda p: p.ray.min_decode <= max(1, p.cell.decode),
    ),
    Rule(("choices_per_decode",), "must be at least 1", lambda p: p.ray.choices_per_decode >= 1),
    Rule(("prompts_per_prefill",), "must be at least 1", lambda p: p.ray.prompts_per_prefill >= 1),
    Rule(("scale_up_delay_s",), "must be 0 or more", lambda p: 0 <= p.ray.scale_up_delay_s < math.inf),
    Rule(("scale_down_delay_s",), "must be 0 or more", lambda p: 0 <= p.ray.scale_down_delay_s < math.inf),
    Rule(("cpus_per_worker",), "must be above 0", lambda p: 0 < p.ray.cpus_per_worker < math.inf),
    Rule(("gpus_per_worker",), "must be 0 or more", lambda p: 0 <= p.ray.gpus_per_worker < math.inf),
    Rule(("resources_of",), f"must be {RESOURCE}", _resources_fit),
    Rule(("prefill_port",), f"must be 0 (free ports) to {MAX_PORT}", lambda p: 0 <= p.ray.prefill_port <= MAX_PORT),
    Rule(("decode_port",), f"must be 0 (free ports) to {MAX_PORT}", lambda p: 0 <= p.ray.decode_port <= MAX_PORT),
    Rule(
        ("prefill_port", "decode_port"),
        "each replica's port is its role's first one and its rank: the two must be further apart",
        bases_apart,
    ),
    Rule(
        ("prefill_port", "prefill"),
        f"each replica's port is the first one and its rank: the last one must be at most {MAX_PORT}",
        lambda p: last_port(p.ray.prefill_port, p.cell.prefill, p.ray) <= MAX_PORT,
    ),
    Rule(
        ("decode_port", "decode"),
        f"each replica's port is the first one and its rank: the last one must be at most {MAX_PORT}",
        lambda p: last_port(p.ray.decode_port, p.cell.decode, p.ray) <= MAX_PORT,
    ),
    Rule(
        ("port", "ingress"),
        "clients could not know where Serve listens: it is no free port that it can take",
        lambda p: p.server.port != 0,
    ),
    Rule(("app_name",), "must be not empty", lambda p: bool(p.ray.app_name.strip())),
    Rule(
        ("prefix_router", "ingress"),
        "a gateway chooses by prefix anyway: it is for --ingress direct",
        lambda p: not p.ray.prefix_router or p.ray.ingress is Ingress.DIRECT,
    ),
)

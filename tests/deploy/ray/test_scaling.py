"""The number of replicas that a load needs."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from motet.deploy.ray.options import DECODE, PREFILL, deployment_options, max_replicas_of
from motet.deploy.ray.scaling import CHOICES, FULLNESS, PROMPTS, ReplicasByLoad, load_of
from motet.metrics.stats import EngineStats
from motet.settings.declaration import ServerCommand
from motet.settings.resolve import resolve_settings

Figures = Mapping[str, Mapping[object, float]]


@dataclass(frozen=True)
class FakeContext:
    """Fake of Serve's `AutoscalingContext`."""

    aggregated_metrics: Figures | None


def target(*choices: float, fullness: tuple[float, ...] = (), per_replica: int = 64) -> int:
    """Returns the target number of replicas, for the number of open choices on each present replica."""
    figures: Figures = {CHOICES: dict(enumerate(choices)), FULLNESS: dict(enumerate(fullness))}
    number, _ = ReplicasByLoad(figure=CHOICES, per_replica=per_replica)(FakeContext(figures))
    return number


@pytest.mark.parametrize(
    ("choices", "replicas"),
    [
        ((0.0,), 0),
        ((1.0,), 1),
        ((64.0,), 1),
        ((65.0,), 2),
        ((40.0, 40.0), 2),
        ((64.0, 64.0, 1.0), 3),
        ((200.0, 0.0), 4),
    ],
)
def test_the_target_depends_on_the_choices_of_all_replicas(choices: tuple[float, ...], replicas: int) -> None:
    assert target(*choices) == replicas


def test_a_rounding_error_in_the_mean_adds_no_replica() -> None:
    assert target(0.1 * 3 / 0.3 * 64) == 1  # 64.00000000000001


def test_a_replica_that_is_nearly_full_counts_for_more_than_its_choices() -> None:
    assert target(8.0, fullness=(0.5,)) == 1
    assert target(8.0, fullness=(0.9,)) == 2
    assert target(8.0, 8.0, fullness=(0.45, 0.45)) == 2  # the same load on two replicas
    assert target(130.0, fullness=(0.5,)) == 3


@pytest.mark.parametrize("figures", [None, {}, {FULLNESS: {"a": 1.0}}])
def test_without_reports_the_target_is_zero(figures: Figures | None) -> None:
    assert ReplicasByLoad(figure=PROMPTS, per_replica=4)(FakeContext(figures)) == (0, {})


def test_prompts_are_counted_for_prefill() -> None:
    figures: Figures = {CHOICES: {"a": 500.0}, PROMPTS: {"a": 4.5}}
    assert ReplicasByLoad(figure=PROMPTS, per_replica=4)(FakeContext(figures)) == (2, {})


def test_a_replica_reports_its_open_choices_and_how_full_it_is() -> None:
    stats = EngineStats(
        groups_running=2, groups_waiting=3, choices_running=16, choices_waiting=24, blocks_used=30, blocks_total=100
    )
    assert load_of(stats, stats, max_num_seqs=32) == {CHOICES: 40.0, PROMPTS: 5.0, FULLNESS: 0.5}
    assert load_of(stats, stats, max_num_seqs=160)[FULLNESS] == 0.3
    assert load_of(EngineStats(), EngineStats(), max_num_seqs=32) == {CHOICES: 0.0, PROMPTS: 0.0, FULLNESS: 0.0}


def test_a_prompt_that_started_and_ended_between_two_reports_counts_once() -> None:
    before, after = EngineStats(prompt_tokens=100), EngineStats(prompt_tokens=300)
    assert load_of(after, before, max_num_seqs=32)[PROMPTS] == 1.0
    assert load_of(after, after, max_num_seqs=32)[PROMPTS] == 0.0


def test_scaled_deployments_have_a_range_and_a_policy_in_place_of_a_number() -> None:
    given = {"autoscale": True, "prefill": 2, "decode": 3, "choices_per_decode": 16, "scale_down_delay_s": 7.0}
    given |= {"scale_up_delay_s": 3.0, "min_decode": 2}
    options = deployment_options(resolve_settings(given, environ={}, command=ServerCommand.RAY))
    prefill, decode = (options[name]["autoscaling_config"] for name in (PREFILL, DECODE))
    assert (prefill["min_replicas"], prefill["max_replicas"]) == (0, 2)
    assert (decode["min_replicas"], decode["max_replicas"]) == (2, 3)
    assert decode["policy"] == {
        "policy_function": "motet.deploy.ray.scaling.ReplicasByLoad",
        "policy_kwargs": {"figure": "choices", "per_replica": 16},
    }
    assert prefill["policy"]["policy_kwargs"] == {"figure": "prompts", "per_replica": 4}
    assert decode["upscale_delay_s"] == 3.0
    assert (decode["downscale_delay_s"], prefill["downscale_to_zero_delay_s"]) == (7.0, 35.0)
    assert not any("num_replicas" in options[name] for name in (PREFILL, DECODE))
    maximum = {name: max_replicas_of(one) for name, one in options.items()}
    assert maximum == {"directory": 1, "prefill": 2, "decode": 3, "gateway": 1}

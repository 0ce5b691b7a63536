"""An impossible setting of the scheduler is refused by its name; the least and the most of each are possible."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from evenhand.core.cache_map import CacheMap
from evenhand.core.errors import InvalidConfig, InvalidInput
from evenhand.core.facts import CostWeights, SchedulerConfig
from evenhand.core.ids import PoolId
from evenhand.core.presence import Presence
from evenhand.core.scheduler import PoolScheduler
from evenhand.core.setting_bounds import COST_BOUNDS, SETTING_BOUNDS, Bounds
from evenhand.wire.generated import scheduler_pb2 as pb

WHOLE = [name for name, bounds in SETTING_BOUNDS.items() if isinstance(bounds.least, int)]
ORDERED = {"worker_stale_after_ms", "worker_lost_after_ms"}
"""One must not be larger than the other."""


def config(**changes: Any) -> SchedulerConfig:
    return replace(SchedulerConfig(PoolId("p")), **changes)


def beyond(bounds: Bounds) -> list[Any]:
    """Values that it cannot be."""
    least, most = bounds.least, bounds.most
    return [-1, math.nan, math.inf, -math.inf, least - abs(least) - 1, most * 2 + 1, True, "1", None]


@pytest.mark.parametrize("name", SETTING_BOUNDS)
def test_what_is_outside_of_its_bounds_is_refused_by_name(name: str) -> None:
    for value in beyond(SETTING_BOUNDS[name]):
        if name == "window_fixed" and value is None:
            continue
        with pytest.raises(InvalidConfig, match=rf"^{name} must [^\n]*\.$"):
            config(**{name: value})


@pytest.mark.parametrize("name", WHOLE)
def test_a_part_of_a_whole_is_none(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{name} must be a whole number, not 3.5"):
        config(**{name: 3.5})


@pytest.mark.parametrize("name", SETTING_BOUNDS)
def test_the_least_and_the_most_are_allowed(name: str) -> None:
    bounds = SETTING_BOUNDS[name]
    for value in (bounds.least, bounds.most):
        both = dict.fromkeys(ORDERED, value) if name in ORDERED else {name: value}
        PoolScheduler(config(**both), Presence(CacheMap()))


def test_what_travels_fits_its_field() -> None:
    ttl_ms = SETTING_BOUNDS["ticket_ttl_ms"].most
    assert pb.AcquireResponse(ttl_ms=int(ttl_ms)).ttl_ms == ttl_ms


def test_nobody_would_ever_be_looked_at() -> None:
    for name in ("tenants_considered_max", "users_considered_max", "requests_considered_max"):
        with pytest.raises(InvalidConfig, match=f"{name} must be at least 1, not 0"):
            config(**{name: 0})


@pytest.mark.parametrize("name", COST_BOUNDS)
def test_a_weight_of_cost_is_refused_by_name(name: str) -> None:
    for value in beyond(COST_BOUNDS[name]):
        with pytest.raises(InvalidConfig, match=rf"^cost\.{name} must "):
            config(cost=replace(CostWeights(), **{name: value}))
    with pytest.raises(InvalidConfig, match=r"cost\.floor must lie between"):
        config(cost=CostWeights(floor=0.0))


def test_a_worker_is_stale_before_it_is_lost() -> None:
    config(worker_stale_after_ms=8, worker_lost_after_ms=8)
    with pytest.raises(InvalidConfig, match="worker_stale_after_ms must be at most worker_lost_after_ms"):
        config(worker_stale_after_ms=9, worker_lost_after_ms=8)


@pytest.mark.parametrize(
    ("bands", "says"),
    [((), "1 to 64 bands, not 0"), ((("a", 1.0), ("a", 1.0)), "a is named twice"), ((("a", math.nan),), "nan")],
)
def test_bands_that_cannot_be(bands: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        PoolScheduler(config(bands=bands), Presence(CacheMap()))


def test_every_number_has_bounds() -> None:
    numbers = {
        field.name for field in fields(SchedulerConfig) if "int" in str(field.type) or "float" in str(field.type)
    }
    assert numbers - {"bands"} == set(SETTING_BOUNDS)
    assert {field.name for field in fields(CostWeights)} == set(COST_BOUNDS)

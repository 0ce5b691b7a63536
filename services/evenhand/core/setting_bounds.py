"""What a setting of the scheduler may be: the least and the most of each, by name.

A setting outside of them is refused before anything is decided by it. The least is where the setting still means
something: nobody is looked at where 0 tenants are (so nothing would ever run), a cost of 0 would be free, a
negative penalty would seek what it should shun. The most keeps sums of nanoseconds and of cost tokens exact.
"""

from typing import TYPE_CHECKING, Final, NamedTuple

from evenhand.core.errors import InvalidConfig

if TYPE_CHECKING:
    from evenhand.core.facts import SchedulerConfig

WHOLE_MAX: Final = 1 << 53
"""Whole numbers up to here are exact as a float, too."""
WIRE_MAX: Final = (1 << 32) - 1
"""Most of a whole number that a message carries in 32 bits."""
HOUR_MS: Final = 3_600_000
FACTOR_MAX: Final = 1e6
RATE_MIN, RATE_MAX = 1e-3, 1e12


class Bounds(NamedTuple):
    """Least and most of a number; of a whole one where both are ``int``."""

    least: float
    most: float

    def check(self, name: str, value: object) -> None:
        """Raise ``InvalidConfig`` that names the setting where the value is none of these."""
        whole = isinstance(self.least, int)
        if isinstance(value, bool) or not isinstance(value, int | float) or (whole and isinstance(value, float)):
            kind = "whole number" if whole else "number"
            raise InvalidConfig(f"{name} must be a {kind}, not {value!r}.")
        if whole and value < self.least:
            raise InvalidConfig(f"{name} must be at least {self.least}, not {value}.")
        if not self.least <= value <= self.most:
            raise InvalidConfig(f"{name} must lie between {self.least} and {self.most}, not {value}.")


COST_BOUNDS: Final = {
    "uncached": Bounds(0.0, FACTOR_MAX),
    "cached": Bounds(0.0, FACTOR_MAX),
    "output": Bounds(0.0, FACTOR_MAX),
    "floor": Bounds(1e-6, 1e9),
}
SETTING_BOUNDS: Final = {
    "window_delay_ms": Bounds(0.0, float(HOUR_MS)),
    "window_fixed": Bounds(0.0, 1e18),
    "tenants_considered_max": Bounds(1, WHOLE_MAX),
    "users_considered_max": Bounds(1, WHOLE_MAX),
    "sticky_tenants_max": Bounds(0, WHOLE_MAX),
    "requests_considered_max": Bounds(1, WHOLE_MAX),
    "overtakes_max": Bounds(0, WHOLE_MAX),
    "prefill_pending_max_tokens": Bounds(1, WHOLE_MAX),
    "engine_full_fraction": Bounds(0.0, 1.0),
    "cold_decline_tokens": Bounds(1, WHOLE_MAX),
    "cold_wait_factor": Bounds(0.0, FACTOR_MAX),
    "cold_wait_ms_max": Bounds(0, HOUR_MS),
    "cold_wait_backlog_factor": Bounds(0.0, FACTOR_MAX),
    "load_penalty": Bounds(0.0, FACTOR_MAX),
    "prefill_penalty": Bounds(0.0, FACTOR_MAX),
    "fill_penalty": Bounds(0.0, FACTOR_MAX),
    "headroom_divisor": Bounds(2, WHOLE_MAX),
    "guarantee_burst_ms": Bounds(0.0, float(HOUR_MS)),
    "guaranteed_share_sum_max": Bounds(0.0, 0.99),
    "ticket_ttl_ms": Bounds(3, WIRE_MAX),
    "leg_ms_max": Bounds(3, WHOLE_MAX),
    "ticket_confirm_ms": Bounds(1, WHOLE_MAX),
    "taken_over_wait_max_ms": Bounds(1, WHOLE_MAX),
    "worker_stale_after_ms": Bounds(1, WHOLE_MAX),
    "worker_lost_after_ms": Bounds(1, WHOLE_MAX),
    "output_estimate_default_tokens": Bounds(1, WHOLE_MAX),
    "queued_total_max": Bounds(1, WHOLE_MAX),
    "legs_max": Bounds(1, WHOLE_MAX),
    "outcomes_remembered_max": Bounds(1, WHOLE_MAX),
    "matches_refresh_ms": Bounds(0, WHOLE_MAX),
    "prefill_rate_default_tokens_per_s": Bounds(RATE_MIN, RATE_MAX),
    "output_token_default_ms": Bounds(RATE_MIN, float(HOUR_MS)),
    "cost_rate_default_per_s": Bounds(RATE_MIN, RATE_MAX),
    "retry_after_default_ms": Bounds(1, HOUR_MS),
}


def check_settings(values: "SchedulerConfig") -> None:
    """Raise ``InvalidConfig`` for the first of these numbers that no pool can be scheduled by."""
    for name, bounds in SETTING_BOUNDS.items():
        value = getattr(values, name)
        if value is not None or name != "window_fixed":
            bounds.check(name, value)
    for name, bounds in COST_BOUNDS.items():
        bounds.check(f"cost.{name}", getattr(values.cost, name))
    if values.worker_stale_after_ms > values.worker_lost_after_ms:
        raise InvalidConfig("worker_stale_after_ms must be at most worker_lost_after_ms.")

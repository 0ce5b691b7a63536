"""How long a tenant can have to wait, in time: P3 and P8 of ``docs/fairness.md`` as one sum.

While a tenant stays in A undispatched, each sibling can be booked at most ``φ_j · (T + v_i + X̂_i − v_j + ĉ_j +
Ô_j + X̂_j)`` before it lies outside the window of the waiting one; the same holds for the other bands among bands,
as far as what the siblings get has raised the clock of their own band. Whose wait is the longest depends on
weights too: a light tenant may wait longer for a heavy one that is ahead of it than that one for all the others.
A pool that is full dispatches as fast as it delivers, at R, of which guarantees may take their part beside the
clocks. Then it is the tenant's turn, and the last things to wait for are room, at most the longest residual of
what runs, and a warmer worker than the one that is free, at most the cold wait. So::

    cost  = Σ siblings + Σ other bands + guaranteed rate · burst + one charge of each guaranteed tenant
    wait  = cost / (R · (1 − guaranteed share)) + longest residual + longest cold wait

What the sum takes for granted: R stays what it is (it is what the pool delivers while siblings wait for warmer
workers too); nobody else comes (each newcomer adds its own term); nobody who is more behind is held up (each adds
a residual and a cold wait of its own); charges and wrong estimates are no larger than those seen so far and those
open now; legs end within their output limit (who renews a ticket without end is bounded by ``leg_ms_max`` and
``concurrency_max`` alone).

Pure: plain numbers in, milliseconds out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sibling:
    """A node in A among its siblings. ``charge``, ``over`` and ``under`` (ĉ, Ô, X̂) are in virtual time."""

    v: float
    weight: float
    charge: float
    over: float
    under: float

    def cost_before(self, v: float, window: float) -> float:
        """Cost that may be booked to it while a sibling whose clock is at most ``v`` waits."""
        return max(0.0, self.weight * (window + v - self.v + self.charge + self.over + self.under))


@dataclass(frozen=True, slots=True)
class BandSiblings:
    """A band among bands, its tenants in A, the window among them and the largest V_w: where a newcomer starts."""

    band: Sibling
    tenants: tuple[Sibling, ...]
    window: float
    virtual_time_max: float


@dataclass(frozen=True, slots=True)
class WorstWait:
    """Worst-case waits in milliseconds; infinite where a pool delivers nothing beside its guarantees."""

    in_a_ms: float
    """Of whichever tenant is in A."""
    newcomer_ms: float
    """Of a tenant that enters A now, in whichever band."""


def cost_ahead(v: float, window: float, others: Iterable[Sibling]) -> float:
    """Cost that siblings may be booked while one whose clock is at most ``v`` waits."""
    return sum(other.cost_before(v, window) for other in others)


def most_cost_ahead(window: float, siblings: Sequence[Sibling]) -> float:
    """Cost that may be booked to the others while one of these waits, whichever it is that waits for most.

    Its own undercharges may still raise its clock. O(n log n): what one of the others may be booked is 0 up to
    some clock of the one that waits, and from there on grows with it, by its weight.
    """
    base = min((each.v for each in siblings), default=0.0)
    begins = sorted(
        (each.v - base - window - each.charge - each.over - each.under, each.weight) for each in siblings
    )
    waiting = sorted((each.v + each.under, at) for at, each in enumerate(siblings))
    most = weights = before = 0.0
    passed = 0
    for clock, at in waiting:
        v = clock - base
        while passed < len(begins) and begins[passed][0] < v:
            begin, weight = begins[passed]
            weights, before, passed = weights + weight, before + weight * begin, passed + 1
        most = max(most, weights * v - before - siblings[at].cost_before(clock, window))
    return most


def wait_ms(cost: float, cost_rate_per_s: float, guaranteed_share: float, residual_ms: float) -> float:
    """Time in which a full pool has dispatched so much, and the last leg in the way has ended."""
    rate = cost_rate_per_s * (1.0 - guaranteed_share)
    return cost / rate * 1000.0 + residual_ms if rate > 0.0 else math.inf


def worst_wait(
    bands: Sequence[BandSiblings],
    window_of_bands: float,
    bands_virtual_time_max: float,
    cost_rate_per_s: float,
    guaranteed_share: float,
    guarantees_cost: float,
    residual_ms: float,
) -> WorstWait:
    """Of any tenant in A, and of a newcomer, in the band where it is worst.

    ``guarantees_cost`` is what guarantees may take at once: their rates · burst, and one charge of each;
    ``residual_ms`` all that may be waited for after one's turn has come: room, and a warmer worker.
    """
    in_a_cost = newcomer_cost = 0.0
    for own in bands:
        others = [other.band for other in bands if other is not own]

        def through_bands(tenants_cost: float, own: BandSiblings = own, others: list[Sibling] = others) -> float:
            """What siblings get raises the band's clock, and each time the other bands follow."""
            # Corrections of what the band and the tenant itself have running may still raise their own clocks.
            v = own.band.v + own.band.under + tenants_cost / own.band.weight
            return tenants_cost + cost_ahead(v, window_of_bands, others)

        if own.tenants:
            in_a_cost = max(in_a_cost, through_bands(most_cost_ahead(own.window, own.tenants)))
        before_newcomer = cost_ahead(own.virtual_time_max, own.window, own.tenants)
        newcomer_cost = max(newcomer_cost, through_bands(before_newcomer))
    entering = cost_ahead(bands_virtual_time_max, window_of_bands, [own.band for own in bands])
    newcomer_cost = max(newcomer_cost, entering)
    return WorstWait(
        wait_ms(in_a_cost + guarantees_cost, cost_rate_per_s, guaranteed_share, residual_ms),
        wait_ms(newcomer_cost + guarantees_cost, cost_rate_per_s, guaranteed_share, residual_ms),
    )

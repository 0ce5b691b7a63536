"""What VTC's authors published, and the five measurements behind it.

The figures are those of the paper's tables and of its artifact's recorded runs, by the artifact's own plots. The
recorded overload of first come first served lasted 600 s, all other synthetic overloads 360 s; it is repeated so.
"""

from dataclasses import dataclass
from enum import Enum

from evenhand.simulation.vtc.workloads import Ask, arena, evenly, numbered


class Rule(Enum):
    """Who decides which request is served next."""

    FCFS = "FCFS"
    VTC = "VTC"
    VTC_NOISY = "VTC, prediction ±50 %"
    VTC_ORACLE = "VTC, oracle"
    EVENHAND_T0 = "Evenhand, T = 0"
    EVENHAND = "Evenhand"


class Measure(Enum):
    """What is measured; the value is its name with its unit."""

    ACCUMULATED = "accumulated service difference, maximum (cost tokens)"
    FIRST_WAIT = "client 1's time to first token, P99 (s)"
    WINDOWED = "service difference in 60 s windows, maximum (cost tokens/s)"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload, what is measured there, and the published figures."""

    name: str
    told: str
    rates_per_s: tuple[float, ...]
    """Of clients 1 … n; none: the arena trace."""
    duration_s: float
    first_on_s: float
    """Client 1 asks for so long, and pauses as long; 0: it never pauses."""
    measure: Measure
    published: tuple[tuple[Rule, float], ...]
    fcfs_duration_s: float = 0.0
    """Where FCFS ran for another time; 0: for the same."""

    def asks(self, rule: Rule, seed: int) -> list[Ask]:
        """The requests of one run."""
        if not self.rates_per_s:
            return arena(seed)
        longer = rule is Rule.FCFS and self.fcfs_duration_s
        duration_s = self.fcfs_duration_s if longer else self.duration_s
        return evenly(numbered(self.rates_per_s, first_on_s=self.first_on_s), duration_s, seed)

    def rules(self) -> tuple[Rule, ...]:
        """Those with a published figure, then ours."""
        return (*(rule for rule, _figure in self.published), Rule.EVENHAND_T0, Rule.EVENHAND)


MEASUREMENTS = (
    Measurement(
        "overload",
        "two clients, 1.5 and 3 requests/s, each more than its half",
        (1.5, 3.0),
        360.0,
        0.0,
        Measure.ACCUMULATED,
        ((Rule.FCFS, 237_738), (Rule.VTC, 9_050), (Rule.VTC_NOISY, 1_789), (Rule.VTC_ORACLE, 377)),
        fcfs_duration_s=600.0,
    ),
    Measurement(
        "eight-clients",
        "three clients at 0.4 and five at 0.6 requests/s, each more than its eighth",
        (0.4, 0.4, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6),
        360.0,
        0.0,
        Measure.ACCUMULATED,
        ((Rule.FCFS, 34_823), (Rule.VTC, 2_976), (Rule.VTC_NOISY, 1_277), (Rule.VTC_ORACLE, 746)),
    ),
    Measurement(
        "on-off",
        "client 1 at 0.5 requests/s every second minute, client 2 at 2",
        (0.5, 2.0),
        600.0,
        60.0,
        Measure.FIRST_WAIT,
        ((Rule.FCFS, 173.5), (Rule.VTC, 8.3)),
    ),
    Measurement(
        "proportional",
        "three clients at 0.25, 0.5 and 1.5 requests/s",
        (0.25, 0.5, 1.5),
        600.0,
        0.0,
        Measure.FIRST_WAIT,
        ((Rule.FCFS, 196.0), (Rule.VTC, 10.4)),
    ),
    Measurement(
        "arena",
        "27 clients of a chat arena, 1,500 requests in 600 s",
        (),
        600.0,
        0.0,
        Measure.WINDOWED,
        ((Rule.FCFS, 759.97), (Rule.VTC, 368.40), (Rule.VTC_ORACLE, 329.46)),
    ),
)

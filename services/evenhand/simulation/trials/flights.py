"""What the driver keeps of a request on its way, and of a worker. Written by ``trial`` alone."""

from evenhand.core.ids import WorkerId
from evenhand.engine.batching import Engine
from evenhand.engine.request import EngineRequest
from evenhand.policies.policy import Arrival
from evenhand.simulation.trials.engine_orders import TrialOrder
from evenhand.simulation.trials.map_feed import MapFeed
from evenhand.simulation.trials.record import Outcome, TenantSeries


class Flight:
    """A request between arrival and end."""

    __slots__ = ("admitted", "arrival", "base", "outcome", "request", "series", "since", "worker")

    def __init__(self, arrival: Arrival, outcome: Outcome, series: TenantSeries) -> None:
        self.arrival = arrival
        self.outcome = outcome
        self.series = series
        self.worker: TrialWorker | None = None
        self.request: EngineRequest | None = None
        self.admitted = False
        """Its prompt is booked: the engine it is on took it in."""
        self.base = 0
        """Output tokens booked when it last began to decode."""
        self.since = 0
        """The worker's ``steps`` at that time."""


class TrialWorker:
    """One engine and its place in time."""

    __slots__ = ("busy", "cancels", "decoding", "decoding_of", "engine", "epoch", "feed", "flights", "index",
                 "order", "prompt_tokens", "resuming", "steps", "worker_id")  # fmt: skip

    def __init__(self, index: int) -> None:
        self.index = index
        self.worker_id = WorkerId(f"w{index:04}")
        self.engine: Engine | None = None
        """None while the worker is down."""
        self.epoch = 0
        self.prompt_tokens = 0
        """Computed, cached ones not among them."""
        self.order: TrialOrder | None = None
        """None: an order that counts nothing."""
        self.feed: MapFeed | None = None
        self.begin()

    def begin(self) -> None:
        """A life begins: nothing is there."""
        self.busy = False
        """A step is under way, or about to begin."""
        self.steps = 0
        """Steps made; those under way not among them."""
        self.flights: dict[int, Flight] = {}
        self.decoding: dict[int, Flight] = {}
        self.decoding_of: dict[str, int] = {}
        """How many of them, by tenant."""
        self.resuming: list[EngineRequest] = []
        """Preempted before, admitted again, in their prefill."""
        self.cancels: list[int] = []
        """To leave when the step under way ends."""

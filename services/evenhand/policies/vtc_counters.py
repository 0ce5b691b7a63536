"""Virtual token counters: the service each client has had, as VTC keeps it (Sheng et al., OSDI 2024).

For whoever admits requests by VTC, an engine's waiting queue or a router: this module keeps the counters and
names the client whose turn it is; the queues themselves, and what fits, are the caller's.

::

    enters the queue   if none of its requests waited:   counter = max(counter, floor), where floor is the least
                       counter of those that wait; if nobody waits, the counter of the last one that left
    admitted           counter += (input_cost · input + output_cost · predicted output) / weight
    produced           counter += output_cost / weight for each token beyond the prediction
    ended              counter −= output_cost / weight for each token the prediction was too high

Plain VTC predicts 0, so it pays for each token as it is produced and the last line never applies. With an
exact prediction (the paper's oracle) everything is paid at admission.

The published code leaves the counter alone where nobody waits; the paper's algorithm, followed here, does not.

Holds always: with nothing under way, the sum of all charges of a client, ÷ its weight, is what its requests
really took; a counter falls only by what was predicted too high; ties go to the client seen first, so nothing
depends on hashing. No clock, no randomness: a noisy prediction is the caller's number.
"""

from collections.abc import Mapping

from evenhand.core.ids import TenantId

INPUT_COST = 1.0
"""Published cost of an input token."""

OUTPUT_COST = 2.0
"""Published cost of an output token."""


class VtcLeg:
    """One admitted request: what was predicted for it, and what it has produced."""

    __slots__ = ("client", "ended", "predicted_output_tokens", "produced_tokens")

    def __init__(self, client: TenantId, predicted_output_tokens: float) -> None:
        self.client = client
        self.predicted_output_tokens = predicted_output_tokens
        self.produced_tokens = 0
        self.ended = False


class VtcCounters:
    """The counters of all clients. A client not named in ``weights`` weighs 1; its counter starts at 0.

    Example, one turn::

        counters.enter("a")                      # a request of a was queued
        client = counters.least()                # whose turn it is
        counters.leave(client)                   # its request was taken from the queue
        leg = counters.admit(client, input_tokens=256)
        counters.produce(leg, 1)                 # as often as a token comes
        counters.end(leg)
    """

    def __init__(
        self,
        *,
        input_cost: float = INPUT_COST,
        output_cost: float = OUTPUT_COST,
        weights: Mapping[TenantId, float] | None = None,
    ) -> None:
        self.input_cost = input_cost
        self.output_cost = output_cost
        self._weights = dict(weights or {})
        assert all(weight > 0 for weight in self._weights.values()), "a weight is positive"
        self._counters: dict[TenantId, float] = {}
        """In the order in which clients were first seen."""
        self._queued: dict[TenantId, int] = {}
        """Requests waiting; only clients that have some."""
        self._last_left: TenantId | None = None

    def counter(self, client: TenantId) -> float:
        """Cost charged to the client ÷ its weight, lifts included; 0 if it was never seen."""
        return self._counters.get(client, 0.0)

    def weight(self, client: TenantId) -> float:
        """The client's share relative to others."""
        return self._weights.get(client, 1.0)

    def set_weight(self, client: TenantId, weight: float) -> None:
        """Weigh a client from here on; charges made before keep theirs."""
        assert weight > 0, "a weight is positive"
        self._weights[client] = weight

    def queued(self, client: TenantId) -> int:
        """How many of the client's requests wait."""
        return self._queued.get(client, 0)

    def enter(self, client: TenantId) -> None:
        """A request of the client joined the queue; lifts the client if none of its requests waited."""
        waiting = self._queued.get(client, 0)
        if not waiting:
            own = self._counters.setdefault(client, 0.0)
            if self._queued:
                self._counters[client] = max(own, min(self._counters[other] for other in self._queued))
            elif self._last_left is not None:
                self._counters[client] = max(own, self._counters[self._last_left])
        self._queued[client] = waiting + 1

    def leave(self, client: TenantId) -> None:
        """A request of the client left the queue: admitted or withdrawn."""
        waiting = self._queued.get(client, 0)
        assert waiting, "only who waits can leave"
        if waiting > 1:
            self._queued[client] = waiting - 1
        else:
            del self._queued[client]
            self._last_left = client

    def least(self) -> TenantId | None:
        """The client whose turn it is: least counter of those that wait, then first seen; None if none waits."""
        best: TenantId | None = None
        least = 0.0
        for client, counter in self._counters.items():
            if client in self._queued and (best is None or counter < least):
                best, least = client, counter
        return best

    def admit(self, client: TenantId, input_tokens: float, predicted_output_tokens: float = 0.0) -> VtcLeg:
        """Charge a request at its admission; whether ``input_tokens`` counts cached ones is the caller's rule."""
        assert input_tokens >= 0, "tokens are counted from 0"
        assert predicted_output_tokens >= 0, "tokens are counted from 0"
        cost = self.input_cost * input_tokens + self.output_cost * predicted_output_tokens
        self._charge(client, cost)
        return VtcLeg(client, predicted_output_tokens)

    def produce(self, leg: VtcLeg, tokens: int = 1) -> None:
        """Charge output tokens as they are produced, as far as they are beyond the prediction."""
        assert not leg.ended, "a leg that ended produces nothing"
        before, paid = leg.produced_tokens, leg.predicted_output_tokens
        leg.produced_tokens = after = before + tokens
        if after > paid:
            self._charge(leg.client, self.output_cost * (after - (max(paid, before))))

    def end(self, leg: VtcLeg) -> None:
        """The request finished or was cancelled: give back what was predicted and not produced."""
        assert not leg.ended, "a leg ends once"
        leg.ended = True
        surplus = leg.predicted_output_tokens - leg.produced_tokens
        if surplus > 0:
            self._charge(leg.client, -self.output_cost * surplus)

    def _charge(self, client: TenantId, cost: float) -> None:
        self._counters[client] = self._counters.get(client, 0.0) + cost / self.weight(client)

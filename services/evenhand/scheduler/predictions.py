"""Whether predicted cached tokens come true: an alarm for a map that differs from what engines hold.

A single miss is no fault: a block may be evicted between decision and prefill, and a refutation then corrects the
map. Predictions that *keep* missing, in either direction, mean that something between engine and map is broken
(events lost unseen, keys computed otherwise, an engine that does not report cached tokens), and that affinity
chooses blindly. So for each worker the sums of ``min`` and ``max`` of predicted and reported cached tokens are
kept, and forget; a worker is *mispredicted* while the first is below ``AGREED_SHARE_MIN`` of the second, over at
least ``LEGS_MIN`` legs in which either was above zero.

Always: at most ``WORKERS_MAX`` workers are remembered, those heard of last; a later epoch starts from nothing.
Only usage that is believed counts, of legs that produced output for the prompt as granted, and no more of it than
keys were told for: what a client gave no keys for could not be foreseen. The metrics name no worker, so their
series are bounded; ``/status`` does.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from evenhand.core.facts import LegOutcome
from evenhand.core.ids import Epoch, WorkerId
from evenhand.core.steps import LegEnded
from evenhand.logs import get_logger

AGREED_SHARE_MIN = 0.5
LEGS_MIN = 16
"""Legs before a worker is judged."""
KEPT_PER_LEG = 1 - 1 / 64
"""What a further leg leaves of the sums before it."""
WORKERS_MAX = 4_096

log = get_logger("scheduler.predictions")


@dataclass(slots=True)
class _Record:
    """Of one life of a worker; tokens decayed, legs whole."""

    epoch: Epoch
    agreed_tokens: float = 0.0
    larger_tokens: float = 0.0
    legs: int = 0

    @property
    def mispredicted(self) -> bool:
        return self.legs >= LEGS_MIN and self.agreed_tokens < AGREED_SHARE_MIN * self.larger_tokens


class Predictions(Collector):
    """Predicted against reported: pool-wide as counters, per worker as an alarm."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._records: OrderedDict[WorkerId, _Record] = OrderedDict()
        self._predicted_tokens = self._reported_tokens = self._agreed_tokens = 0
        registry.register(self)

    def ended(self, ended: LegEnded) -> None:
        """Take in how a leg ended."""
        ticket, usage = ended.ticket, ended.usage
        if ended.outcome is not LegOutcome.SETTLED or usage is None or not usage.cached_known:
            return
        if usage.output_tokens < 1 or usage.prompt_tokens != ticket.prompt_tokens:
            return
        predicted = ticket.predicted_cached_tokens
        reported = min(usage.cached_tokens, max(predicted, ended.keyed_tokens))
        if not predicted and not reported:
            return
        self._predicted_tokens += predicted
        self._reported_tokens += reported
        self._agreed_tokens += min(predicted, reported)
        record = self._record(ticket.worker_id, ticket.epoch)
        if record is None:
            return
        before = record.mispredicted
        record.agreed_tokens = record.agreed_tokens * KEPT_PER_LEG + min(predicted, reported)
        record.larger_tokens = record.larger_tokens * KEPT_PER_LEG + max(predicted, reported)
        record.legs += 1
        if record.mispredicted and not before:
            share = round(record.agreed_tokens / record.larger_tokens, 3)
            log.warning("predictions_keep_missing", worker=ticket.worker_id, agreed_share=share)

    def forget(self, worker_id: WorkerId) -> None:
        """The worker is gone."""
        self._records.pop(worker_id, None)

    @property
    def mispredicted(self) -> tuple[WorkerId, ...]:
        """Workers whose predictions keep missing, by name."""
        return tuple(sorted(worker_id for worker_id, record in self._records.items() if record.mispredicted))

    @property
    def workers_remembered(self) -> int:
        return len(self._records)

    def collect(self) -> Iterator[Metric]:
        for name, help_text, tokens in (
            ("predicted", "Cached tokens predicted, of legs that told their usage.", self._predicted_tokens),
            ("reported", "Cached tokens reported by engines for the same legs.", self._reported_tokens),
            ("agreed", "The lesser of the two, leg by leg.", self._agreed_tokens),
        ):
            yield CounterMetricFamily(f"evenhand_scheduler_cached_tokens_{name}", help_text, value=tokens)
        yield GaugeMetricFamily(
            "evenhand_scheduler_workers_mispredicted",
            "Alarm: workers whose predictions keep missing what their engines report.",
            value=len(self.mispredicted),
        )

    def _record(self, worker_id: WorkerId, epoch: Epoch) -> _Record | None:
        """The record of this life of the worker; None for a leg of an earlier one."""
        record = self._records.get(worker_id)
        if record is None or record.epoch < epoch:
            record = self._records[worker_id] = _Record(epoch)
            if len(self._records) > WORKERS_MAX:
                self._records.popitem(last=False)
        elif record.epoch > epoch:
            return None
        self._records.move_to_end(worker_id)
        return record

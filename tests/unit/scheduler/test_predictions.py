"""Predictions that keep missing what engines report raise an alarm; a miss now and then does not."""

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from evenhand.core.facts import LegOutcome, Ticket, Usage
from evenhand.core.ids import Epoch, RequestId, TenantId, TicketId, WorkerId
from evenhand.core.steps import LegEnded
from evenhand.scheduler import predictions
from evenhand.scheduler.predictions import LEGS_MIN, Predictions

PROMPT = 1_000


def leg(predicted: int, reported: int, worker: str = "w", epoch: int = 1, keyed: int = PROMPT) -> LegEnded:
    ticket = Ticket(
        ticket_id=TicketId("t"),
        request_id=RequestId("r"),
        tenant_id=TenantId("a"),
        worker_id=WorkerId(worker),
        epoch=Epoch(epoch),
        leg=1,
        term=1,
        charge=1.0,
        weight=1.0,
        prompt_tokens=PROMPT,
        predicted_cached_tokens=predicted,
        output_tokens_estimated=1,
        output_tokens_max=1,
        granted_at_ns=0,
    )
    return LegEnded(ticket, LegOutcome.SETTLED, 1.0, 0.0, Usage(PROMPT, reported, 1), False, keyed)


def alarm(watch: Predictions, registry: CollectorRegistry) -> float:
    page = generate_latest(registry).decode()
    (line,) = [line for line in page.splitlines() if line.startswith("evenhand_scheduler_workers_mispredicted ")]
    assert float(line.split()[1]) == len(watch.mispredicted)
    return float(line.split()[1])


def fresh() -> tuple[Predictions, CollectorRegistry]:
    registry = CollectorRegistry()
    return Predictions(registry), registry


def test_promises_that_keep_failing_raise_the_alarm_and_later_successes_end_it() -> None:
    watch, registry = fresh()
    for _ in range(LEGS_MIN - 1):
        watch.ended(leg(800, 0))
    assert alarm(watch, registry) == 0
    watch.ended(leg(800, 0))
    assert alarm(watch, registry) == 1
    assert watch.mispredicted == ("w",)
    for _ in range(200):
        watch.ended(leg(800, 800))
    assert alarm(watch, registry) == 0


def test_hits_that_nobody_foresaw_raise_the_alarm_too() -> None:
    watch, registry = fresh()
    for _ in range(LEGS_MIN):
        watch.ended(leg(0, 800))
    assert alarm(watch, registry) == 1


def test_a_miss_now_and_then_is_no_alarm() -> None:
    watch, registry = fresh()
    for number in range(400):
        watch.ended(leg(800, 0 if number % 4 == 0 else 800))
        assert alarm(watch, registry) == 0


def test_what_could_not_be_foreseen_or_is_not_known_counts_for_nothing() -> None:
    watch, registry = fresh()
    for _ in range(LEGS_MIN * 2):
        watch.ended(leg(0, 800, keyed=0))
        watch.ended(leg(0, 0))
        watch.ended(replace(leg(800, 0), usage=None))
        watch.ended(replace(leg(800, 0), usage=Usage(PROMPT, 0, 0)))
        watch.ended(replace(leg(800, 0), usage=Usage(PROMPT // 2, 0, 5)))
        watch.ended(replace(leg(800, 0), outcome=LegOutcome.WORKER_LOST))
    assert alarm(watch, registry) == 0
    assert watch.workers_remembered == 0


def test_workers_are_judged_apart_and_a_later_life_starts_anew() -> None:
    watch, _ = fresh()
    for _ in range(LEGS_MIN):
        watch.ended(leg(800, 0, "bad"))
        watch.ended(leg(800, 800, "good"))
    assert list(watch.mispredicted) == ["bad"]
    watch.ended(leg(800, 0, "bad", epoch=2))
    assert list(watch.mispredicted) == []
    for _ in range(LEGS_MIN):
        watch.ended(leg(800, 0, "bad", epoch=1))
    assert list(watch.mispredicted) == [], "late legs of the earlier life blame nobody"


def test_memory_is_bounded_and_returns() -> None:
    watch, _ = fresh()
    for number in range(predictions.WORKERS_MAX + 50):
        watch.ended(leg(800, 0, f"w{number}"))
    assert watch.workers_remembered == predictions.WORKERS_MAX
    for number in range(predictions.WORKERS_MAX + 50):
        watch.forget(WorkerId(f"w{number}"))
    assert watch.workers_remembered == 0

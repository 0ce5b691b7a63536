"""The actor's own part: who hears what, and what is cancelled when calls go away.

The core is a script here: it grants, refuses or keeps silent as the test says.
"""

import asyncio
import time
from collections.abc import Callable

import pytest

from evenhand.core.facts import (
    ChoiceReason,
    Decision,
    LegOutcome,
    Refusal,
    RefusalReason,
    Request,
    Ticket,
    Usage,
)
from evenhand.core.ids import Epoch, RequestId, Seq, TenantId, TicketId, WorkerId
from evenhand.core.kv import KeysRefuted
from evenhand.core.steps import (
    Cancel,
    Effect,
    Granted,
    Input,
    LegEnded,
    Refused,
    Refute,
    Renewed,
    Settle,
    Submit,
    Tick,
    TicketUnknown,
    WakeAt,
)
from evenhand.scheduler.actor import OpenTicket, PoolActor, Waiter
from evenhand.scheduler.adoption import Adoption
from evenhand.scheduler.lease_clock import lease_now_ns
from evenhand.scheduler.metrics import SchedulerMetrics
from evenhand.scheduler.tickets import TicketSigner
from evenhand.wire.status import WireError, wire_error

A = TenantId("a")
HOUR_NS = 3_600 * 10**9


class Script:
    """A core that does what it is told and remembers what it was asked."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.answer: Callable[[Input], tuple[Effect, ...]] = lambda _: ()

    def step(self, step_input: Input, now_ns: int, /) -> tuple[Effect, ...]:
        self.inputs.append(step_input)
        return self.answer(step_input)

    def asked(self, kind: type) -> list[Input]:
        return [step_input for step_input in self.inputs if isinstance(step_input, kind)]


class Call:
    """One call's waiter and what it heard."""

    def __init__(self, request_id: str) -> None:
        self.heard: list[OpenTicket | WireError] = []
        self.waiter = Waiter((A, RequestId(request_id)), lambda _, result: self.heard.append(result))

    @property
    def reason(self) -> str:
        assert len(self.heard) == 1
        result = self.heard[0]
        return result.reason if isinstance(result, WireError) else f"granted {result.ticket.ticket_id}"


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def refuted() -> list[KeysRefuted]:
    return []


@pytest.fixture
def actor(script: Script, refuted: list[KeysRefuted]) -> PoolActor:
    actor = PoolActor(TicketSigner(b"k" * 32), SchedulerMetrics("p", 2), refuted.append, 1_000, 3)
    actor.begin_term(script, 1, lease_now_ns() + HOUR_NS, Adoption())
    return actor


def request(request_id: str = "r") -> Request:
    return Request(RequestId(request_id), A, (), 1, 1)


def ticket(request_id: str = "r", ticket_id: str = "t", term: int = 1) -> Ticket:
    worker = WorkerId("w")
    return Ticket(
        TicketId(ticket_id),
        RequestId(request_id),
        A,
        worker,
        Epoch(1),
        1,
        term,
        1.0,
        1.0,
        1,
        0,
        1,
        1,
        time.monotonic_ns(),
    )


def granted(request_id: str = "r", ticket_id: str = "t") -> Granted:
    decision = Decision(RequestId(request_id), A, ChoiceReason.LOAD, (), (), 1, 0.0, 1.0, 0.0, 1.0, 0.0, False)
    return Granted(ticket(request_id, ticket_id), decision)


def refused(reason: RefusalReason, request_id: str = "r") -> Refused:
    return Refused(A, RequestId(request_id), Refusal(reason, "No."))


def ended(outcome: LegOutcome, ticket_id: str = "t", continues: bool = False) -> LegEnded:
    return LegEnded(ticket(ticket_id=ticket_id), outcome, 1.0, 0.0, None, continues)


def test_a_grant_reaches_every_call_of_the_request_once(actor: PoolActor, script: Script) -> None:
    first, second = Call("r"), Call("r")
    actor.submit(request(), first.waiter)
    actor.submit(request(), second.waiter)
    script.answer = lambda _: (granted(),)
    actor.tell(Tick())
    actor.tell(Tick())
    assert (first.reason, second.reason) == ("granted t", "granted t")
    assert actor.by_token[next(iter(actor.by_token))].holders == 2
    assert not actor._waiting
    assert actor._waiting_count == 0


def test_a_grant_that_nobody_heard_of_is_given_back_unused(actor: PoolActor, script: Script) -> None:
    call = Call("r")
    script.answer = lambda _: (granted(),)
    actor.submit(request(), call.waiter)
    script.answer = lambda _: (ended(LegOutcome.CANCELLED),)
    actor.withdraw(call.waiter)
    actor.withdraw(call.waiter)
    assert script.asked(Cancel) == [Cancel(A, RequestId("r"), Usage())]
    assert not actor.open
    assert not actor.by_token


def test_a_grant_that_another_call_holds_stays(actor: PoolActor, script: Script) -> None:
    first, second = Call("r"), Call("r")
    script.answer = lambda _: (granted(),)
    actor.submit(request(), first.waiter)
    actor.submit(request(), second.waiter)
    actor.withdraw(first.waiter)
    assert not script.asked(Cancel)
    actor.withdraw(second.waiter)
    assert len(script.asked(Cancel)) == 1


def test_a_grant_whose_request_another_call_waits_for_again_stays(actor: PoolActor, script: Script) -> None:
    first, second = Call("r"), Call("r")
    script.answer = lambda _: (granted(),)
    actor.submit(request(), first.waiter)
    script.answer = lambda _: ()
    actor.submit(request(), second.waiter)
    actor.withdraw(first.waiter)
    assert not script.asked(Cancel)


def test_a_wait_given_up_is_cancelled_unless_another_waits(actor: PoolActor, script: Script) -> None:
    first, second = Call("r"), Call("r")
    actor.submit(request(), first.waiter)
    actor.submit(request(), second.waiter)
    actor.withdraw(first.waiter)
    assert not script.asked(Cancel)
    script.answer = lambda _: (refused(RefusalReason.CANCELLED),)
    actor.withdraw(second.waiter)
    assert script.asked(Cancel) == [Cancel(A, RequestId("r"))]
    assert not first.heard
    assert not second.heard
    assert actor._waiting_count == 0


def test_a_bad_newcomer_alone_hears_its_refusal(actor: PoolActor, script: Script) -> None:
    first, second = Call("r"), Call("r")
    actor.submit(request(), first.waiter)
    script.answer = lambda _: (refused(RefusalReason.REQUEST_ID_REUSED),)
    actor.submit(request(), second.waiter)
    assert (first.heard, second.reason) == ([], "REQUEST_ID_REUSED")
    script.answer = lambda _: (refused(RefusalReason.DEADLINE),)
    actor.tell(Tick())
    assert first.reason == "DEADLINE_PASSED"


def test_no_more_calls_wait_than_are_allowed(actor: PoolActor) -> None:
    calls = [Call(f"r{number}") for number in range(5)]
    for number, call in enumerate(calls):
        actor.submit(request(f"r{number}"), call.waiter)
    assert [len(call.heard) for call in calls] == [0, 0, 0, 1, 1]
    assert calls[3].reason == "TENANT_QUEUE_FULL"
    actor.withdraw(calls[3].waiter)
    actor.withdraw(calls[0].waiter)
    late = Call("late")
    actor.submit(request("late"), late.waiter)
    assert not late.heard


def test_a_call_whose_answer_fails_takes_nothing_from_the_others(actor: PoolActor, script: Script) -> None:
    heard: list[OpenTicket | WireError] = []

    def deliver(_: Waiter, result: OpenTicket | WireError) -> None:
        heard.append(result)
        if isinstance(result, OpenTicket):
            raise ValueError("cannot be written")

    failing, other, third = Waiter((A, RequestId("r1")), deliver), Call("r2"), Call("r3")
    actor.submit(request("r1"), failing)
    actor.submit(request("r2"), other.waiter)
    actor.submit(request("r3"), third.waiter)

    def answer(step_input: Input) -> tuple[Effect, ...]:
        if isinstance(step_input, Tick):
            return (
                granted("r1", "t1"),
                granted("r2", "t2"),
                refused(RefusalReason.NO_WORKER, "r3"),
            )
        assert step_input == Cancel(A, RequestId("r1"), Usage())
        return (ended(LegOutcome.CANCELLED, "t1"),)

    script.answer = answer
    actor.tell(Tick())
    assert [result.reason if isinstance(result, WireError) else "" for result in heard] == ["", "INTERNAL_FAULT"]
    assert (other.reason, third.reason) == ("granted t2", "NO_WORKER_IN_POOL")
    assert list(actor.open) == [TicketId("t2")]
    assert len(script.asked(Cancel)) == 1
    assert b'evenhand_scheduler_faults_total{task="answer"} 1.0' in actor._metrics.page()
    actor.withdraw(failing)
    assert len(script.asked(Cancel)) == 1


def test_a_listener_that_fails_takes_nothing_from_the_others(actor: PoolActor, script: Script) -> None:
    class Failing:
        def ticket_ended(self, entry: OpenTicket, ended: LegEnded) -> None:
            raise ValueError("gone")

    call, waiting = Call("r"), Call("r2")
    script.answer = lambda _: (granted(),)
    actor.submit(request(), call.waiter)
    entry = actor.open[TicketId("t")]
    actor.listen(entry.ticket, entry.token, Failing())
    script.answer = lambda _: ()
    actor.submit(request("r2"), waiting.waiter)
    script.answer = lambda _: (ended(LegOutcome.EXPIRED), granted("r2", "t2"))
    actor.tell(Tick())
    assert waiting.reason == "granted t2"
    assert b'evenhand_scheduler_faults_total{task="ticket_ended"} 1.0' in actor._metrics.page()


def test_past_its_lease_it_decides_nothing(actor: PoolActor, script: Script) -> None:
    waiting, late = Call("r1"), Call("r2")
    actor.submit(request("r1"), waiting.waiter)
    actor.extend_lease(lease_now_ns() - 1)
    asked = len(script.inputs)
    actor.submit(request("r2"), late.waiter)
    actor.tell(Tick())
    assert actor.renew(TicketId("t"), None) is None
    assert actor.settle(Settle(TicketId("t"), None)) is None
    assert actor.cancel((A, RequestId("r1")), None) is None
    assert len(script.inputs) == asked
    assert late.reason == "NOT_THE_OWNER"
    assert not waiting.heard
    actor.end_term("Over.")
    assert waiting.reason == "NOT_THE_OWNER"
    assert not actor.granting


def test_terms_only_grow(actor: PoolActor, script: Script) -> None:
    actor.end_term("Over.")
    with pytest.raises(AssertionError, match="terms only grow"):
        actor.begin_term(script, 1, lease_now_ns() + HOUR_NS, Adoption())


def test_answers_of_renew_and_settle(actor: PoolActor, script: Script) -> None:
    script.answer = lambda _: (granted("other", "other"), Renewed(TicketId("t"), 5, 3))
    assert actor.renew(TicketId("t"), None) == Renewed(TicketId("t"), 5, 3)
    script.answer = lambda _: (TicketUnknown(TicketId("t"), LegOutcome.EXPIRED),)
    assert actor.settle(Settle(TicketId("t"), None)) == TicketUnknown(TicketId("t"), LegOutcome.EXPIRED)
    end = ended(LegOutcome.SETTLED)
    script.answer = lambda _: (end, granted("next", "next"))
    assert actor.settle(Settle(TicketId("t"), None)) == end


def test_cancel_tells_whether_anything_was_open(actor: PoolActor, script: Script) -> None:
    key = (A, RequestId("r"))
    assert actor.cancel(key, None) is False
    script.answer = lambda _: (refused(RefusalReason.CANCELLED, "other"),)
    assert actor.cancel(key, None) is False
    script.answer = lambda _: (refused(RefusalReason.CANCELLED),)
    assert actor.cancel(key, None) is True
    script.answer = lambda _: (ended(LegOutcome.CANCELLED),)
    assert actor.cancel(key, None) is True


class Listener:
    def __init__(self) -> None:
        self.told: list[LegOutcome] = []

    def ticket_ended(self, entry: OpenTicket, ended: LegEnded) -> None:
        self.told.append(ended.outcome)


def test_who_listens_hears_of_an_end_it_did_not_bring_about(actor: PoolActor, script: Script) -> None:
    listener = Listener()
    for ticket_id, outcome in (("t1", LegOutcome.WORKER_LOST), ("t2", LegOutcome.SETTLED)):
        call = Call(ticket_id)
        script.answer = lambda _, ticket_id=ticket_id: (granted(ticket_id, ticket_id),)  # type: ignore[misc]
        actor.submit(request(ticket_id), call.waiter)
        entry = call.heard[0]
        assert isinstance(entry, OpenTicket)
        entry.listener = listener
        script.answer = lambda _, ticket_id=ticket_id, outcome=outcome: (ended(outcome, ticket_id),)  # type: ignore[misc]
        if outcome is LegOutcome.SETTLED:
            actor.settle(Settle(TicketId(ticket_id), None))
        else:
            actor.tell(Tick())
    assert listener.told == [LegOutcome.WORKER_LOST]


def test_refutations_are_passed_on(actor: PoolActor, script: Script, refuted: list[KeysRefuted]) -> None:
    wish = KeysRefuted(WorkerId("w"), Epoch(1), Seq(1), (1,))
    script.answer = lambda _: (Refute(wish),)
    actor.tell(Tick())
    assert refuted == [wish]


async def test_it_wakes_when_the_core_wants_and_no_later(actor: PoolActor, script: Script) -> None:
    woken = asyncio.Event()
    wanted_ns = time.monotonic_ns() + 300_000_000

    def answer(step_input: Input) -> tuple[Effect, ...]:
        if isinstance(step_input, Tick) and time.monotonic_ns() >= wanted_ns:
            woken.set()
        return (WakeAt(wanted_ns),) if not isinstance(step_input, Tick) else ()

    script.answer = answer
    actor.submit(request(), Call("r").waiter)
    await asyncio.wait_for(woken.wait(), 5)
    assert time.monotonic_ns() - wanted_ns < 150_000_000
    actor.end_term("Over.")


async def test_an_earlier_wish_to_wake_counts(actor: PoolActor, script: Script) -> None:
    began_ns = time.monotonic_ns()
    ticked = asyncio.Event()

    def answer(step_input: Input) -> tuple[Effect, ...]:
        if isinstance(step_input, Tick):
            ticked.set()
            return ()
        return (WakeAt(began_ns + 10**10), WakeAt(began_ns + 20_000_000))

    script.answer = answer
    actor.submit(request(), Call("r").waiter)
    await asyncio.wait_for(ticked.wait(), 5)
    assert time.monotonic_ns() - began_ns < 200_000_000
    actor.end_term("Over.")


def test_a_submitted_request_is_stepped(actor: PoolActor, script: Script) -> None:
    actor.submit(request(), Call("r").waiter)
    assert script.inputs == [Submit(request())]


def test_a_limit_that_bound_is_told_in_facts_too(actor: PoolActor, script: Script) -> None:
    call = Call("r")
    sentence, limit = "No more now.", "user_tokens_per_minute"
    refusal = Refusal(RefusalReason.RATE_LIMITED, sentence, 250, limit, -7)
    script.answer = lambda _: (Refused(A, RequestId("r"), refusal),)
    actor.submit(request(), call.waiter)
    (error,) = call.heard
    assert error == wire_error(
        "TENANT_RATE_LIMITED", sentence, 250, f"tenant:{A}", {"limit": limit, "remaining": "-7"}
    )

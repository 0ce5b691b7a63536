"""Checkers of lives are checked: of requests, of tickets, of who is inside an engine, of what is paid or left.

As in ``test_checkers_catch``: a fault is put in by hand, and a run must say so; unbroken, the same seeds hold.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.hand_faults import Case, check_noticed, run_until_violated

from evenhand.core.cache_map import WorkerCache
from evenhand.core.errors import InvalidRequest
from evenhand.core.explain import Explainer
from evenhand.core.facts import LegOutcome, RefusalReason, Ticket
from evenhand.core.ids import RequestId, WorkerId
from evenhand.core.legs import Legs
from evenhand.core.outstanding import Outstanding
from evenhand.core.requests import Requests
from evenhand.core.steps import Granted, LegEnded, Renewed
from evenhand.core.tickets import TicketBook
from evenhand.scheduler import calls
from evenhand.scheduler.actor import PoolActor
from evenhand.scheduler.adoption import Adoption
from evenhand.scheduler.calls import Calls
from evenhand.scheduler.directory_watch import DirectoryWatch
from evenhand.scheduler.live_map import LiveMap
from evenhand.simulation.system import client as simulated_client
from evenhand.simulation.system.client import Client, Stream
from evenhand.simulation.system.engine import SimulatedEngine, SimulatedPoller
from evenhand.simulation.system.faults import CHANCES, Fault
from evenhand.simulation.system.hosts import WatchedActor
from evenhand.wire.scheduler_codec import decode_usage, encode_worker
from evenhand.worker.load import EnginePolled

# ---- who is inside an engine


def all_to_one_worker(patch: pytest.MonkeyPatch) -> None:
    """Every grant names the first worker, whichever was chosen."""
    named: list[Any] = []

    def encode(worker_id: Any, spec: Any) -> Any:
        named.append((worker_id, spec))
        return encode_worker(*named[0])

    patch.setattr(calls, "encode_worker", encode)


def first_token_settles(patch: pytest.MonkeyPatch) -> None:
    """A ticket ends with the first usage that is told of, though its leg runs on."""
    real = Requests.renew

    def renew(self: Requests, renew: Any, now_ns: int, effects: list[Any]) -> None:
        real(self, renew, now_ns, effects)
        held = self._legs.book.get(renew.ticket_id)
        if held is not None and renew.usage is not None:
            self.end(held, LegOutcome.SETTLED, renew.usage, now_ns, effects)

    patch.setattr(Requests, "renew", renew)


def unheard(patch: pytest.MonkeyPatch) -> None:
    """An engine computes no more for a client that is gone, and never lets go of its request."""
    real = SimulatedEngine._end

    def end(self: SimulatedEngine, leg: Any, how: str) -> None:
        if how == "cancelled":
            leg.end = how
        else:
            real(self, leg, how)

    patch.setattr(SimulatedEngine, "_end", end)
    patch.setitem(CHANCES, Fault.CLIENTS_CANCEL, 0.5)


# ---- one outcome a request


def refused_while_served(patch: pytest.MonkeyPatch) -> None:
    """A request that runs is refused as well."""
    real = Requests.renew

    def renew(self: Requests, renew: Any, now_ns: int, effects: list[Any]) -> None:
        real(self, renew, now_ns, effects)
        held = self._legs.book.get(renew.ticket_id)
        if held is not None:
            ticket = held.ticket
            self.refuse(ticket.tenant_id, ticket.request_id, RefusalReason.CANCELLED, "It runs.", effects)

    patch.setattr(Requests, "renew", renew)


def granted_unasked(patch: pytest.MonkeyPatch) -> None:
    """A grant is told twice, the second time for a request that nobody made."""
    told_of(patch, "open", lambda granted: replace(granted, ticket=stranger(granted.ticket)))


def stranger(ticket: Ticket) -> Ticket:
    return replace(ticket, request_id=RequestId(f"{ticket.request_id}'"))


def told_of(patch: pytest.MonkeyPatch, name: str, changed: Callable[[Any], Any]) -> None:
    """What is told of a grant is not what was done."""
    real = getattr(Legs, name)
    patch.setattr(Legs, name, lambda self, *arguments: changed(real(self, *arguments)))


def answers_twice(patch: pytest.MonkeyPatch) -> None:
    """A client has two outcomes."""
    real = Client._finish

    def finish(self: Client, leg: Any) -> None:
        real(self, leg)
        real(self, leg)

    patch.setattr(Client, "_finish", finish)


def never_expires(patch: pytest.MonkeyPatch) -> None:
    """Tickets of lost clients stay open."""
    patch.setattr(TicketBook, "expired", lambda _self, _now_ns: ())
    patch.setattr(TicketBook, "next_expiry_ns", lambda _self: None)


def answer_fails(patch: pytest.MonkeyPatch) -> None:
    """Putting an answer into words fails."""

    def encode(*_: Any) -> Any:
        raise KeyError("reason")

    patch.setattr(calls, "encode_explanation", encode)


def settlement_refused(patch: pytest.MonkeyPatch) -> None:
    """No outcome is a good one."""

    def decode(_number: int) -> Any:
        raise InvalidRequest("There is no such outcome.")

    patch.setattr(calls, "decode_outcome", decode)


# ---- tickets


def ids_again(patch: pytest.MonkeyPatch) -> None:
    """Grants are counted from 0 again whenever nothing is open."""
    real = Legs.open

    def opened(self: Legs, choice: Any, now_ns: int) -> Granted:
        if not len(self.book):
            self.granted_count = 0
        return real(self, choice, now_ns)

    patch.setattr(Legs, "open", opened)


def granted_otherwise(patch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a granted request again is told of a ticket that is not the same."""
    real = Requests.submit

    def submit(self: Requests, submit: Any, now_ns: int, effects: list[Any]) -> None:
        real(self, submit, now_ns, effects)
        if effects and isinstance(effects[-1], Granted):
            granted = effects[-1]
            effects[-1] = replace(granted, ticket=replace(granted.ticket, worker_id=WorkerId("elsewhere")))

    patch.setattr(Requests, "submit", submit)


def split_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A ticket states another charge than its split costs."""
    told_of(patch, "open", lambda g: replace(g, ticket=replace(g.ticket, charge=g.ticket.charge * 0.9)))


def told_as_backfilled(patch: pytest.MonkeyPatch) -> None:
    """A ticket that had its turn states that it has passed somebody."""
    told_of(
        patch,
        "open",
        lambda g: replace(
            g, ticket=replace(g.ticket, backfilled=True), decision=replace(g.decision, backfilled=True)
        ),
    )


def ended_as(patch: pytest.MonkeyPatch, changed: Callable[[LegEnded], tuple[LegEnded, ...]]) -> None:
    """The end of a leg is told otherwise."""
    real = Legs.end

    def end(self: Legs, *arguments: Any) -> None:
        real(self, *arguments)
        effects = arguments[-1]
        at = max(index for index, effect in enumerate(effects) if isinstance(effect, LegEnded))
        effects[at : at + 1] = changed(effects[at])

    patch.setattr(Legs, "end", end)


def ends_twice(patch: pytest.MonkeyPatch) -> None:
    ended_as(patch, lambda ended: (ended, ended))


def corrected_by_half(patch: pytest.MonkeyPatch) -> None:
    ended_as(patch, lambda ended: (replace(ended, correction=ended.correction / 2 + 1.0),))


def goes_on_after_its_end(patch: pytest.MonkeyPatch) -> None:
    ended_as(patch, lambda ended: (replace(ended, request_continues=True),))


def closed_is_renewed(patch: pytest.MonkeyPatch) -> None:
    """A ticket that is over is renewed all the same."""
    real = Requests.renew
    renewed: list[Renewed] = []

    def renew(self: Requests, renew: Any, now_ns: int, effects: list[Any]) -> None:
        if renewed and self._legs.book.get(renew.ticket_id) is None:
            effects.append(replace(renewed[0], ticket_id=renew.ticket_id))
            return
        real(self, renew, now_ns, effects)
        renewed.extend(effect for effect in effects if isinstance(effect, Renewed))

    patch.setattr(Requests, "renew", renew)


def outcomes_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A ticket of an earlier term that has ended is taken up once more."""
    for name in ("outcome", "closed"):
        patch.setattr(TicketBook, name, lambda _self, _ticket_id: None)
    patch.setattr(Adoption, "may", lambda *_: True)
    patch.setitem(CHANCES, Fault.ANSWERS_LOST, 0.6)


# ---- what is paid


def lost_is_paid(patch: pytest.MonkeyPatch) -> None:
    """A leg whose worker was lost keeps its charge."""
    real = Legs._attained

    def attained(self: Legs, held: Any, outcome: LegOutcome, usage: Any) -> float:
        return held.booked if outcome is LegOutcome.WORKER_LOST else real(self, held, outcome, usage)

    patch.setattr(Legs, "_attained", attained)


def charged_otherwise_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """An end states half of what was charged, and is right by that."""

    def halved(ended: LegEnded) -> tuple[LegEnded, ...]:
        half = ended.ticket.charge / 2
        return (replace(ended, ticket=replace(ended.ticket, charge=half), correction=ended.attained - half),)

    ended_as(patch, halved)


def cached_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    """What was cached gets lost on the wire."""
    patch.setattr(calls, "decode_usage", lambda wire: replace(decode_usage(wire), cached_tokens=0))


def client_tells_more(patch: pytest.MonkeyPatch) -> None:
    """A client counts one token more than its engine."""
    real = simulated_client.usage_of

    def usage_of(leg: Any) -> Any:
        usage = real(leg)
        usage.output_tokens += 1
        return usage

    patch.setattr(simulated_client, "usage_of", usage_of)


def settles_its_first_ticket(patch: pytest.MonkeyPatch) -> None:
    """A client settles the first ticket it had, whichever served it."""
    real = Client._settle

    async def settle(self: Client, _ticket: str, *told: Any) -> None:
        await real(self, self.tickets[0], *told)

    patch.setattr(Client, "_settle", settle)


# ---- what is left, and what services notice of themselves


def tickets_pile_up(patch: pytest.MonkeyPatch) -> None:
    """The shell keeps what has ended."""
    real = PoolActor._end_leg

    def end_leg(self: PoolActor, ended: LegEnded) -> None:
        entry = self.open.get(ended.ticket.ticket_id)
        real(self, ended)
        if entry is not None:
            self.by_token[entry.token] = entry

    patch.setattr(PoolActor, "_end_leg", end_leg)


def half_is_outstanding(patch: pytest.MonkeyPatch) -> None:
    """A closed ticket gives back half of its cost."""

    def release(self: Outstanding, tenant: Any, cost: float, _tickets_open: int) -> None:
        tenant.outstanding -= cost / 2
        self.total -= cost / 2

    patch.setattr(Outstanding, "release", release)


def tenant_owes(patch: pytest.MonkeyPatch) -> None:
    """The pool knows that all is back, the tenant does not."""
    real = Outstanding.release

    def release(self: Outstanding, tenant: Any, cost: float, tickets_open: int) -> None:
        before = tenant.outstanding
        real(self, tenant, cost, tickets_open)
        tenant.outstanding = before

    patch.setattr(Outstanding, "release", release)


def never_complete(patch: pytest.MonkeyPatch) -> None:
    """A map is never whole, whatever heals it."""
    patch.setattr(WorkerCache, "complete", property(lambda _self: False))


def unknown_worker(patch: pytest.MonkeyPatch) -> None:
    """One worker announces itself in vain."""
    real = LiveMap._enter

    def enter(self: LiveMap, announced: Any) -> None:
        if announced.worker_id != "w0":
            real(self, announced)

    patch.setattr(LiveMap, "_enter", enter)


def engine_unheard(patch: pytest.MonkeyPatch) -> None:
    """No edge ever learns what its engine is."""

    async def poll(self: SimulatedPoller) -> EnginePolled:
        await self._process.pause(1.0)
        return EnginePolled(False, None, None)

    patch.setattr(SimulatedPoller, "poll", poll)


def resolve_fails(patch: pytest.MonkeyPatch) -> None:
    def resolve(*_: Any) -> Any:
        raise KeyError("salt")

    patch.setattr(Calls, "resolve", resolve)


def listener_fails(patch: pytest.MonkeyPatch) -> None:
    """Telling of a ticket's end fails, and is recorded."""
    real = PoolActor._end_leg

    def end_leg(self: PoolActor, ended: LegEnded) -> None:
        real(self, ended)
        self._record("ticket_ended", KeyError("listener"))

    patch.setattr(PoolActor, "_end_leg", end_leg)


def core_fails(patch: pytest.MonkeyPatch) -> None:
    def decision(*_: Any) -> Any:
        raise KeyError("worker")

    patch.setattr(Explainer, "decision", decision)


def task_fails(patch: pytest.MonkeyPatch) -> None:
    async def run(_self: DirectoryWatch) -> None:
        raise KeyError("tenant")

    patch.setattr(DirectoryWatch, "run", run)


def timer_fails(patch: pytest.MonkeyPatch) -> None:
    def arrive(_self: Stream, _what: str) -> None:
        raise KeyError("stream")

    patch.setattr(Stream, "_arrive", arrive)


def same_term_again(patch: pytest.MonkeyPatch) -> None:
    """Every owner takes office for the first term."""
    real = WatchedActor.begin_term
    patch.setattr(
        WatchedActor, "begin_term", lambda self, scheduler, _term, *rest: real(self, scheduler, 1, *rest)
    )


CRASH = "scheduler-crash,answers-lost"
CASES = (
    Case("all to one worker", all_to_one_worker, "requests of this term inside", seeds=(3,)),
    Case("the first token settles", first_token_settles, "is settled for", seeds=(1,)),
    Case("a hang-up is unheard", unheard, "is cancelled for", "clients-cancel", requests=300, seeds=(4, 6)),
    Case("refused while it is served", refused_while_served, "and did not wait", seeds=(1,)),
    Case("granted unasked", granted_unasked, "which did not wait", seeds=(1,)),
    Case("a client has two outcomes", answers_twice, "ended finished, then finished", seeds=(1,)),
    Case("tickets never expire", never_expires, "Not drained", "clients-vanish", seeds=(2,)),
    Case("an answer fails", answer_fails, "was answered INTERNAL", seeds=(1,)),
    Case("no settlement is taken", settlement_refused, "Settle of r", seeds=(1,)),
    Case("ticket ids come again", ids_again, "was granted twice", seeds=(1, 2)),
    Case("a grant is told otherwise", granted_otherwise, "granted again as another", "clients-repeat"),
    Case("a split is forgotten", split_forgotten, "its split costs", seeds=(1,)),
    Case("a turn is told as passing", told_as_backfilled, "had its turn at every level", seeds=(1,)),
    Case("a ticket ends twice", ends_twice, "and was not open", seeds=(1,)),
    Case("half a correction", corrected_by_half, "charge and correction are not", seeds=(1,)),
    Case("a request goes on after its end", goes_on_after_its_end, "yet its request goes on", seeds=(1,)),
    Case("a closed ticket is renewed", closed_is_renewed, "was renewed and is not open", seeds=(1,)),
    Case("outcomes are forgotten", outcomes_forgotten, "taken up again", CRASH, seeds=(1, 2)),
    Case("a lost leg is paid", lost_is_paid, "ended worker_lost, charged", "engine-crash", seeds=(2,)),
    Case("charged otherwise at the end", charged_otherwise_at_the_end, "P5: charges", seeds=(1,)),
    Case("cached is not heard", cached_is_not_heard, "by its engine's count", seeds=(1,)),
    Case("a client tells more", client_tells_more, "its engine counted otherwise", seeds=(1,)),
    Case("the first ticket is settled", settles_its_first_ticket, "no engine saw", "engine-crash", seeds=(7,)),
    Case("a hang-up is unheard, at the end", unheard, "still runs 1 requests", "clients-cancel", seeds=(9,)),
    Case("tickets pile up", tickets_pile_up, "0 tickets open", requests=20, seeds=(1,)),
    Case("half is outstanding", half_is_outstanding, "cost outstanding", requests=20, seeds=(1,)),
    Case("a tenant owes", tenant_owes, "keeps 0 requests of", requests=20, seeds=(1,)),
    Case("a gap is never healed", never_complete, "complete=False", requests=20, seeds=(1,)),
    Case("a worker stays unknown", unknown_worker, "does not know w", requests=20, seeds=(1,)),
    Case("an engine is unheard", engine_unheard, "is not at work", requests=20, seeds=(1,)),
    Case("no salt is told", resolve_fails, "Resolve of tenant-", requests=20, seeds=(1,)),
    Case("a fault is recorded", listener_fails, "recorded a fault of its own", requests=20, seeds=(1,)),
    Case("the core fails", core_fails, "The core failed at", requests=20, seeds=(1,)),
    Case("a task fails", task_fails, "ended with KeyError", requests=20, seeds=(1,)),
    Case("a timer fails", timer_fails, "A fault nobody caught", requests=20, seeds=(1,)),
    Case("a term comes again", same_term_again, "began after term 1", "scheduler-crash", seeds=(1,)),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_put_in_by_hand_is_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_noticed(case, monkeypatch)


UNBROKEN = sorted({(case.faults, case.seeds, case.workload, case.requests) for case in CASES})


@pytest.mark.parametrize(("faults", "seeds", "workload", "requests"), UNBROKEN)
def test_the_seeds_hold_unbroken(faults: str, seeds: tuple[int, ...], workload: str, requests: int) -> None:
    result = run_until_violated(Case("", lambda _: None, "", faults, seeds, workload, requests))
    assert result is None, result.violations

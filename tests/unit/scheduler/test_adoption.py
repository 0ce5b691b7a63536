"""Which tickets of earlier terms may still be taken up by a successor."""

from evenhand.core.facts import Ticket
from evenhand.core.ids import Epoch, RequestId, TenantId, TicketId, WorkerId
from evenhand.scheduler.adoption import TERMS_KEPT_MAX, Adoption, EarlierTerms

TTL_MS = 30_000


def ticket(term: int, number: int = 1) -> Ticket:
    return Ticket(
        ticket_id=TicketId(f"{term}.{number}.1"),
        request_id=RequestId("r"),
        tenant_id=TenantId("a"),
        worker_id=WorkerId("w"),
        epoch=Epoch(1),
        leg=1,
        term=term,
        charge=1.0,
        weight=1.0,
        prompt_tokens=1,
        predicted_cached_tokens=0,
        output_tokens_estimated=1,
        output_tokens_max=1,
        granted_at_ns=0,
    )


def test_a_checkpoint_holds_what_its_own_term_had_granted_before_it() -> None:
    adoption = Adoption(EarlierTerms(), term=3, saved_wall_ms=1_000)
    assert not adoption.may(ticket(3), 1_000)
    assert adoption.may(ticket(3), 1_001)


def test_a_term_too_short_to_hear_of_tickets_does_not_end_them() -> None:
    first = Adoption(EarlierTerms(), term=1, saved_wall_ms=1_000)
    carried = first.state(4_000, TTL_MS)
    second = Adoption(carried, term=2, saved_wall_ms=4_000)
    assert second.may(ticket(1), 1_500)
    assert not second.may(ticket(1), 999)
    assert not second.may(ticket(2), 3_999)


def test_a_term_that_kept_nothing_is_believed() -> None:
    assert Adoption(EarlierTerms(), term=1, saved_wall_ms=1_000).may(ticket(2), 500)
    assert Adoption().may(ticket(1), 0)


def test_what_ended_meanwhile_is_not_taken_up_again_by_later_terms() -> None:
    first = Adoption(EarlierTerms(), term=1, saved_wall_ms=1_000)
    first.ended(ticket(1).ticket_id, 3_000)
    assert not first.may(ticket(1), 1_500)
    second = Adoption(first.state(4_000, TTL_MS), term=2, saved_wall_ms=4_000)
    assert not second.may(ticket(1), 1_500)
    assert second.may(ticket(1, 2), 1_500)


def test_what_is_kept_is_bounded() -> None:
    adoption = Adoption(EarlierTerms(tuple((term, term) for term in range(1, 200))), term=200, saved_wall_ms=1)
    adoption.ended(ticket(1).ticket_id, 0)
    state = adoption.state(TTL_MS + 1, TTL_MS)
    assert len(state.kept_at_ms) == TERMS_KEPT_MAX
    assert state.kept_at_ms[-1] == (200, 1)
    assert state.ended == ()

"""Signed tickets: they come back as they were, and nothing else is accepted."""

import random
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.core.errors import UnknownTicket
from evenhand.core.facts import Ticket
from evenhand.core.ids import Epoch, RequestId, TenantId, TicketId, WorkerId
from evenhand.scheduler.tickets import TicketSigner

KEY = b"k" * 32
TICKET = Ticket(
    ticket_id=TicketId("3-17-1"),
    request_id=RequestId("request"),
    tenant_id=TenantId("tenant-ä"),
    worker_id=WorkerId("worker"),
    epoch=Epoch(1_700_000_000_000),
    leg=2,
    term=3,
    charge=1234.5,
    weight=0.25,
    prompt_tokens=1_000,
    predicted_cached_tokens=512,
    output_tokens_estimated=77,
    output_tokens_max=256,
    granted_at_ns=0,
)


def test_a_ticket_comes_back_as_it_was() -> None:
    signer = TicketSigner(KEY)
    placed = replace(TICKET, band="gold", band_weight=3.0, user="ünal", user_weight=0.5, guaranteed=True)
    filled = replace(TICKET, backfilled=True)
    for ticket in (TICKET, replace(TICKET, prefill_worker_id=WorkerId("prefill")), placed, filled):
        signed = signer.verify(signer.sign(ticket, 1_234))
        assert signed.ticket == ticket
        assert signed.granted_wall_ms == 1_234


def test_a_token_fits_a_header_and_is_the_same_each_time() -> None:
    token = TicketSigner(KEY).sign(TICKET, 1)
    assert token == TicketSigner(KEY).sign(TICKET, 1)
    assert token.isascii()
    assert "=" not in token
    assert len(token) < 300


def test_every_changed_bit_is_noticed() -> None:
    signer = TicketSigner(KEY)
    token = signer.sign(TICKET, 1)
    sealed = urlsafe_b64decode(token + "=" * (-len(token) % 4))
    for bit in range(len(sealed) * 8):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UnknownTicket):
            signer.verify(urlsafe_b64encode(bytes(changed)).rstrip(b"=").decode())


def test_another_pools_key_is_not_ours() -> None:
    with pytest.raises(UnknownTicket):
        TicketSigner(b"x" * 32).verify(TicketSigner(KEY).sign(TICKET, 1))


@given(st.text(max_size=400) | st.binary(max_size=300).map(lambda raw: urlsafe_b64encode(raw).decode()))
def test_nothing_else_is_accepted(token: str) -> None:
    with pytest.raises(UnknownTicket):
        TicketSigner(KEY).verify(token)


def test_a_token_cut_anywhere_is_refused() -> None:
    signer = TicketSigner(KEY)
    token = signer.sign(TICKET, 1)
    for length in range(len(token)):
        with pytest.raises(UnknownTicket):
            signer.verify(token[:length])
    chance = random.Random(1)
    for _ in range(100):
        at = chance.randrange(len(token))
        with pytest.raises(UnknownTicket):
            signer.verify(token[:at] + token[at : at + 4] + token[at:])

"""Signed tickets: what a client holds proves what it was granted, to this scheduler and to its successors.

::

    token = base64url( version ‖ numbers ‖ texts ‖ HMAC-SHA256(key, all before)[:16] )      no padding

Numbers are big-endian and of fixed width, texts are length-prefixed. The token carries tenant, worker, charge, φ
and term, so that a successor that has never heard of a ticket can book it. It is opaque to clients and holds no
secret. Whatever is not exactly what some holder of the key signed is ``UnknownTicket``, without saying why.

The time of the grant is wall-clock, as it must mean something to another process; it decides only whether a
ticket of an earlier term is young enough to be adopted.
"""

import binascii
import hmac
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass

from evenhand.core.errors import UnknownTicket
from evenhand.core.facts import Ticket
from evenhand.core.ids import Epoch, RequestId, TenantId, TicketId, WorkerId

VERSION = 2
MAC_BYTES = 16
TOKEN_CHARACTERS_MAX = 4_096

GUARANTEED = 1
BACKFILLED = 2
"""Flags of a ticket."""

_NUMBERS = struct.Struct(">BBQIQddddIIIIQ7H")
"""Version, flags, epoch, leg, term, charge, φ of tenant, band and user, prompt, cached, output estimated,
output limit, granted ms, 7 lengths."""


@dataclass(frozen=True, slots=True)
class SignedTicket:
    """A ticket whose signature held. ``ticket.granted_at_ns`` is 0: the grant's time is wall-clock, beside it."""

    ticket: Ticket
    granted_wall_ms: int


class TicketSigner:
    """Signs and verifies under one pool's key."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, ticket: Ticket, granted_wall_ms: int) -> str:
        """The token of a ticket; the same ticket and time give the same token."""
        texts = (
            ticket.ticket_id.encode(),
            ticket.request_id.encode(),
            ticket.tenant_id.encode(),
            ticket.worker_id.encode(),
            (ticket.prefill_worker_id or "").encode(),
            ticket.band.encode(),
            ticket.user.encode(),
        )
        numbers = _NUMBERS.pack(
            VERSION,
            GUARANTEED * ticket.guaranteed | BACKFILLED * ticket.backfilled,
            ticket.epoch,
            ticket.leg,
            ticket.term,
            ticket.charge,
            ticket.weight,
            ticket.band_weight,
            ticket.user_weight,
            ticket.prompt_tokens,
            ticket.predicted_cached_tokens,
            ticket.output_tokens_estimated,
            ticket.output_tokens_max,
            granted_wall_ms,
            *map(len, texts),
        )
        payload = numbers + b"".join(texts)
        mac = hmac.digest(self._key, payload, "sha256")[:MAC_BYTES]
        return urlsafe_b64encode(payload + mac).rstrip(b"=").decode("ascii")

    def verify(self, token: str) -> SignedTicket:
        """The ticket in a token; raises ``UnknownTicket`` for anything this pool's key did not sign."""
        try:
            if len(token) > TOKEN_CHARACTERS_MAX:
                raise ValueError("too long")
            sealed = urlsafe_b64decode(token.encode("ascii") + b"=" * (-len(token) % 4))
            payload, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
            expected = hmac.digest(self._key, payload, "sha256")[:MAC_BYTES]
            if not hmac.compare_digest(mac, expected) or payload[:1] != bytes([VERSION]):
                raise ValueError("not signed here")
            return _unpack(payload)
        except (ValueError, struct.error, binascii.Error) as error:
            raise UnknownTicket("The ticket is not one that this pool granted.") from error


def _unpack(payload: bytes) -> SignedTicket:
    (
        _,
        flags,
        epoch,
        leg,
        term,
        charge,
        weight,
        band_weight,
        user_weight,
        prompt_tokens,
        cached_tokens,
        output_tokens_estimated,
        output_tokens_max,
        granted_wall_ms,
        *lengths,
    ) = _NUMBERS.unpack_from(payload)
    texts, start = [], _NUMBERS.size
    for length in lengths:
        texts.append(payload[start : start + length].decode())
        start += length
    if start != len(payload):
        raise ValueError("the lengths do not add up")
    ticket_id, request_id, tenant_id, worker_id, prefill_worker_id, band, user = texts
    ticket = Ticket(
        ticket_id=TicketId(ticket_id),
        request_id=RequestId(request_id),
        tenant_id=TenantId(tenant_id),
        worker_id=WorkerId(worker_id),
        epoch=Epoch(epoch),
        leg=leg,
        term=term,
        charge=charge,
        weight=weight,
        prompt_tokens=prompt_tokens,
        predicted_cached_tokens=cached_tokens,
        output_tokens_estimated=output_tokens_estimated,
        output_tokens_max=output_tokens_max,
        granted_at_ns=0,
        prefill_worker_id=WorkerId(prefill_worker_id) if prefill_worker_id else None,
        band=band,
        band_weight=band_weight,
        user=user,
        user_weight=user_weight,
        guaranteed=bool(flags & GUARANTEED),
        backfilled=bool(flags & BACKFILLED),
    )
    return SignedTicket(ticket, granted_wall_ms)

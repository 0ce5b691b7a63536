"""What each call of ``scheduler.proto`` does, whichever way it came: unary or over a Session.

Plain functions over the actor, without await: who may, decode, step, encode. A call that cannot be served raises
``CallRefused`` with the error to answer. Only Acquire has to wait; it hands its answer to a callback.

A ticket is looked up by its token among those granted here; any other token must carry a valid signature, and one
of an earlier term that nobody here knows is adopted first. Whoever shows a ticket of another tenant is told what
anybody is told who shows none: UNKNOWN_TICKET.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

from evenhand.core.errors import InvalidRequest, UnknownTicket
from evenhand.core.facts import Decision, LegOutcome, RefusalReason, Ticket, Usage
from evenhand.core.ids import TenantId
from evenhand.core.steps import LegEnded, Renewed, Settle, TicketUnknown
from evenhand.ports import PoolSpec
from evenhand.scheduler.actor import OpenTicket, PoolActor, TicketListener, Waiter
from evenhand.scheduler.decision_ids import DecisionIds
from evenhand.scheduler.directory_watch import DirectoryWatch
from evenhand.scheduler.identity import Caller, CallRefused, may_use_tenant, tenant_for
from evenhand.scheduler.live_map import LiveMap
from evenhand.scheduler.secret import MasterSecret, cache_domain
from evenhand.scheduler.tickets import SignedTicket, TicketSigner
from evenhand.wire.generated import scheduler_pb2 as pb
from evenhand.wire.scheduler_codec import (
    decode_acquire,
    decode_outcome,
    decode_request_id,
    decode_usage,
    encode_explanation,
    encode_worker,
)
from evenhand.wire.status import TICKET_ALREADY_CLOSED, UNKNOWN_POOL, UNKNOWN_TICKET, WireError, wire_error

POOL_UNKNOWN_RETRY_MS = 1_000
RENEW_AFTER_MS_MAX = 2_500
"""A holder without a stream renews so often that a successor hears of it within ``ticket_confirm_ms``."""
TTFT_MS_MAX = 3_600_000.0

Answer = Callable[[Waiter, pb.AcquireResponse | WireError], None]


@dataclass(frozen=True, slots=True)
class _Salt:
    """A tenant's cache domain and its salt."""

    domain: str
    salt: str


class Calls:
    """The calls of one pool."""

    def __init__(
        self,
        actor: PoolActor,
        live_map: LiveMap,
        watch: DirectoryWatch,
        secret: MasterSecret,
        signer: TicketSigner,
        pool_id: str,
        ticket_ttl_ms: int,
    ) -> None:
        self._actor = actor
        self._live_map = live_map
        self._watch = watch
        self._secret = secret
        self._signer = signer
        self._pool_id = pool_id
        self._salts: dict[TenantId, _Salt] = {}
        self._salts_as_of: tuple[int, PoolSpec | None] = (-1, None)
        """Directory revision and pool that the salts above were made for."""
        self._decision_ids = DecisionIds()
        self.ticket_ttl_ms = ticket_ttl_ms

    def resolve(self, caller: Caller, wire: pb.ResolveRequest) -> pb.ResolveResponse:
        """What a client needs to compute its keys."""
        pool = self._pool(wire.pool)
        tenant_id = tenant_for(caller, wire.tenant)
        salt = self._salt(pool, tenant_id)
        return pb.ResolveResponse(
            pool=pool.pool_id,
            model=pool.model,
            block_size_tokens=pool.block_size_tokens,
            key_scheme=pool.key_scheme,
            cache_domain=salt.domain,
            salt_generation=pool.salt_generation,
            cache_salt=salt.salt,
            tenant=tenant_id,
        )

    def acquire(self, caller: Caller, wire: pb.AcquireRequest, deadline_ns: int, answer: Answer) -> Waiter:
        """Ask for a place; ``answer`` is called once, perhaps before this returns. See ``PoolActor.withdraw``."""
        pool = self._pool(wire.pool)
        tenant_id = tenant_for(caller, wire.tenant)
        salt = self._salt(pool, tenant_id)
        try:
            request = decode_acquire(wire, tenant_id, deadline_ns, pool.block_size_tokens)
        except InvalidRequest as error:
            raise _invalid(error) from error
        explain = wire.explain

        def deliver(waiter: Waiter, result: OpenTicket | WireError) -> None:
            if isinstance(result, OpenTicket):
                answer(waiter, self._granted(result, pool, salt.salt, explain))
            else:
                answer(waiter, result)

        waiter = Waiter((tenant_id, request.request_id), deliver)
        self._actor.submit(request, waiter)
        return waiter

    def renew(
        self, caller: Caller, token: str, usage: Usage | None, listener: TicketListener | None = None
    ) -> pb.RenewResponse:
        """Keep a ticket alive; a listener takes it up and hears of its end."""
        ticket, signed = self._ticket(caller, token)
        usage = usage if caller.usage_believed else None
        result = self._actor.renew(ticket.ticket_id, usage)
        if signed is not None and _unheard_of(result) and self._actor.adopt(signed):
            result = self._actor.renew(ticket.ticket_id, usage)
        if isinstance(result, Renewed):
            if listener is not None:
                self._actor.listen(ticket, token, listener)
            return pb.RenewResponse(state=pb.TICKET_STATE_OPEN, ttl_ms=result.ttl_ms)
        if result is None:
            raise CallRefused(self._actor.not_the_owner())
        if result.already is None:
            raise _unknown_ticket()
        lost = result.already is LegOutcome.WORKER_LOST
        return pb.RenewResponse(state=pb.TICKET_STATE_WORKER_LOST if lost else pb.TICKET_STATE_CLOSED)

    def settle(self, caller: Caller, wire: pb.SettleRequest) -> pb.SettleResponse:
        """End a ticket."""
        ticket, signed = self._ticket(caller, wire.ticket)
        try:
            outcome = decode_outcome(wire.outcome)
        except InvalidRequest as error:
            raise _invalid(error) from error
        usage, ttft_ms = usage_in(wire), wire.ttft_ms
        if not isfinite(ttft_ms) or not 0.0 <= ttft_ms <= TTFT_MS_MAX:
            raise _invalid(InvalidRequest(f"A time to first token of {ttft_ms} ms is impossible."))
        believed = caller.usage_believed
        if outcome is LegOutcome.WORKER_LOST and not believed:
            outcome = LegOutcome.CANCELLED  # a lost worker gives the charge back, as no usage does
        settle = Settle(
            ticket.ticket_id, usage if believed else None, outcome, ttft_ms if believed and ttft_ms else None
        )
        result = self._actor.settle(settle)
        if signed is not None and _unheard_of(result) and self._actor.adopt(signed):
            result = self._actor.settle(settle)
        if isinstance(result, LegEnded):
            return pb.SettleResponse(
                correction=result.correction,
                attained_cost=result.attained,
                request_continues=result.request_continues,
            )
        if result is None:
            raise CallRefused(self._actor.not_the_owner())
        if result.already is None:
            raise _unknown_ticket()
        sentence = f"The ticket was closed before: {result.already.value}."
        raise CallRefused(wire_error(TICKET_ALREADY_CLOSED, sentence, metadata={"outcome": result.already.value}))

    def cancel(self, caller: Caller, wire: pb.CancelRequest) -> pb.CancelResponse:
        """Give a request up."""
        self._pool(wire.pool)
        tenant_id = tenant_for(caller, wire.tenant)
        try:
            request_id = decode_request_id(wire.request_id)
        except InvalidRequest as error:
            raise _invalid(error) from error
        was_open = self._actor.cancel((tenant_id, request_id), usage_in(wire) if caller.usage_believed else None)
        if was_open is None:
            raise CallRefused(self._actor.not_the_owner())
        return pb.CancelResponse(was_open=was_open)

    def withdraw(self, waiter: Waiter) -> None:
        """The call of this waiter is gone before its answer went out."""
        self._actor.withdraw(waiter)

    def listener_of(self, token: str) -> TicketListener | None:
        """Who is told when this ticket ends by itself."""
        entry = self._actor.by_token.get(token)
        return entry.listener if entry is not None else None

    # ---- within ---------------------------------------------------------------------------------------------

    def _pool(self, named: str) -> PoolSpec:
        if named and named != self._pool_id:
            raise CallRefused(wire_error(UNKNOWN_POOL, f"This scheduler serves pool {self._pool_id} only."))
        pool = self._watch.pool
        if pool is None:
            sentence = f"No worker has joined pool {self._pool_id} yet."
            raise CallRefused(wire_error(RefusalReason.NO_WORKER.value, sentence, POOL_UNKNOWN_RETRY_MS))
        return pool

    def _salt(self, pool: PoolSpec, tenant_id: TenantId) -> _Salt:
        as_of = (self._watch.revision, pool)
        if as_of != self._salts_as_of:
            self._salts.clear()
            self._salts_as_of = as_of
        known = self._salts.get(tenant_id)
        if known is not None:
            return known
        tenant = self._watch.tenants.get(tenant_id)
        if tenant is None:
            sentence = f"Tenant {tenant_id} is not known in pool {pool.pool_id}."
            raise CallRefused(wire_error(RefusalReason.UNKNOWN_TENANT.value, sentence))
        domain = cache_domain(tenant)
        salt = _Salt(domain, self._secret.salt(pool, domain))
        self._salts[tenant_id] = salt
        return salt

    def _ticket(self, caller: Caller, token: str) -> tuple[Ticket, SignedTicket | None]:
        """The ticket a token stands for; beside it the signed form, if it is not one of those granted here."""
        if not self._actor.granting:
            raise CallRefused(self._actor.not_the_owner())
        entry, signed = self._actor.by_token.get(token), None
        if entry is not None:
            ticket = entry.ticket
        else:
            try:
                signed = self._signer.verify(token)
            except UnknownTicket as error:
                raise _unknown_ticket() from error
            ticket = signed.ticket
        if not may_use_tenant(caller, ticket.tenant_id):
            raise _unknown_ticket()
        return ticket, signed

    def _granted(self, entry: OpenTicket, pool: PoolSpec, salt: str, explain: bool) -> pb.AcquireResponse:
        ticket, decision = entry.ticket, entry.decision
        assert decision is not None, "what is granted has been decided"
        if not entry.decision_id:
            entry.decision_id = self._decision_ids.next()
        return pb.AcquireResponse(
            ticket=entry.token,
            request_id=ticket.request_id,
            worker=encode_worker(ticket.worker_id, self._live_map.workers.get(ticket.worker_id)),
            cache_salt=salt,
            salt_generation=pool.salt_generation,
            predicted_cached_tokens=ticket.predicted_cached_tokens,
            predicted_ttft_ms=_predicted_ttft_ms(decision, ticket),
            ttl_ms=self.ticket_ttl_ms,
            renew_after_ms=min(self.ticket_ttl_ms // 3, RENEW_AFTER_MS_MAX),
            leg=ticket.leg,
            charged_cost=ticket.charge,
            explanation=encode_explanation(decision, ticket, entry.decision_id, explain),
        )


def usage_in(wire: pb.SettleRequest | pb.RenewRequest | pb.CancelRequest) -> Usage | None:
    """The usage a message carries, None where it carries none; raises ``CallRefused``."""
    if not wire.HasField("usage"):
        return None
    try:
        return decode_usage(wire.usage)
    except InvalidRequest as error:
        raise _invalid(error) from error


def deadline_after(seconds: float) -> int:
    """A point on the monotonic clock, in nanoseconds."""
    return time.monotonic_ns() + int(seconds * 1e9)


def _predicted_ttft_ms(decision: Decision, ticket: Ticket) -> float:
    for candidate in decision.candidates:
        if candidate.worker_id == ticket.worker_id:
            return candidate.predicted_ttft_ms
    return 0.0


def _unheard_of(result: object) -> bool:
    return isinstance(result, TicketUnknown) and result.already is None


def _unknown_ticket() -> CallRefused:
    return CallRefused(wire_error(UNKNOWN_TICKET, "The ticket is not open here."))


def _invalid(error: InvalidRequest) -> CallRefused:
    return CallRefused(wire_error(RefusalReason.INVALID.value, str(error)))

"""Who may grant: the fenced lease of a pool and the checkpoint written under it.

::

    standby ──lease free or run out──▶ owner (term + 1, checkpoint restored)
       ▲                                  │ renewed every third of its time to live
       └── fenced, or lease run out ◀─────┘ checkpoint every second

The lease's end is reckoned from *before* the call that won it, less a margin, on a clock that a suspend does not
stop (``lease_clock``), so this process stops granting before the store could give the lease to another, whatever
the network did. While Postgres is away decisions go on
from memory until then; past it every call is answered NOT_THE_OWNER, and a term is taken anew when Postgres is
back. If nobody else held one meanwhile, the state in memory at the lapse is restored, not the older checkpoint.

A lapsed term is never revived, even by a renewal that comes through late: inputs were dropped in between.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from evenhand.core.errors import Fenced, Unavailable
from evenhand.core.ids import PoolId
from evenhand.logs import get_logger
from evenhand.ports import Lease, LeaseStore
from evenhand.scheduler.lease_clock import lease_now_ns

MARGIN_DIVISOR = 10
"""The last tenth of a lease is not used."""
RENEWALS_PER_TTL = 3
STANDBY_POLLS_PER_TTL = 8

log = get_logger("scheduler.ownership")


class Office(Protocol):
    """What holding the lease allows; the daemon's side of ownership."""

    def take_office(self, term: int, lease_until_ns: int, checkpoint: bytes | None) -> None:
        """Begin to decide, from a checkpoint if there is one; ``lease_until_ns`` is of the lease's clock."""
        ...

    def extend(self, lease_until_ns: int) -> None: ...

    def checkpoint(self) -> bytes:
        """Clocks and open tickets as they are."""
        ...

    def leave_office(self, sentence: str) -> None:
        """Stop deciding at once."""
        ...


@dataclass(frozen=True, slots=True)
class _Kept:
    """This process's own state at the end of a term."""

    term: int
    payload: bytes


class Ownership:
    """Keeps trying to own the pool, and owns it safely."""

    def __init__(
        self,
        store: LeaseStore,
        pool_id: PoolId,
        holder: str,
        ttl_ms: int,
        checkpoint_interval_ms: int,
        office: Office,
        now_ns: Callable[[], int] = lease_now_ns,
    ) -> None:
        self._store = store
        self._pool_id = pool_id
        self._holder = holder
        self._ttl_ms = ttl_ms
        self._checkpoint_interval_s = checkpoint_interval_ms / 1000
        self._office = office
        self._now_ns = now_ns
        self._lease: Lease | None = None
        self._until_ns = 0
        self._kept: _Kept | None = None
        self.owning = asyncio.Event()
        """Set while this process holds the lease."""

    async def run(self) -> None:
        """Stand by, own, stand by again, until cancelled."""
        while True:
            try:
                if await self._take():
                    await self._own()
            except Unavailable as error:
                log.warning("lease_store_away", error=str(error))
            except TimeoutError:
                log.warning("lease_store_slow")
            await asyncio.sleep(self._ttl_ms / 1000 / STANDBY_POLLS_PER_TTL)

    async def resign(self) -> None:
        """Write a last checkpoint and let the lease go; for a graceful stop, after ``run`` was cancelled."""
        lease = self._lease
        if lease is None:
            return
        try:
            async with asyncio.timeout(self._ttl_ms / 1000):
                if self._now_ns() < self._until_ns:
                    await self._store.save_checkpoint(lease, self._office.checkpoint())
                self._leave("The scheduler is shutting down.")
                await self._store.release(lease)
        except (Unavailable, TimeoutError) as error:
            log.warning("resigned_without_store", error=str(error))
        finally:
            self._leave("The scheduler is shutting down.")

    def _end_of(self, asked_at_ns: int) -> int:
        return asked_at_ns + (self._ttl_ms - self._ttl_ms // MARGIN_DIVISOR) * 1_000_000

    async def _take(self) -> bool:
        asked_at_ns = self._now_ns()
        async with asyncio.timeout(self._ttl_ms / 1000):
            lease = await self._store.acquire(self._pool_id, self._holder, self._ttl_ms)
            if lease is None:
                return False
            stored = await self._store.load_checkpoint(self._pool_id)
        payload = stored.payload if stored is not None else None
        kept = self._kept
        if kept is not None and lease.term == kept.term + 1:
            payload = kept.payload
        self._lease, self._until_ns = lease, self._end_of(asked_at_ns)
        self._office.take_office(lease.term, self._until_ns, payload)
        self.owning.set()
        log.info("term_begun", term=lease.term, restored=payload is not None)
        return True

    async def _own(self) -> None:
        """Hold the lease until it is lost; a fault of a part ends the term as well."""
        lease = self._lease
        assert lease is not None
        tasks = [asyncio.create_task(self._renew(lease)), asyncio.create_task(self._save(lease))]
        sentence = "The scheduler's lease of the pool ran out."
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if any(isinstance(task.exception(), Fenced) for task in done):
                sentence = "Another scheduler owns the pool."
            self._leave(sentence)
            log.warning("term_ended", term=lease.term, reason=sentence)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, Fenced):
                raise end

    async def _renew(self, lease: Lease) -> None:
        """Renew until the lease has run out here."""
        interval_s = self._ttl_ms / 1000 / RENEWALS_PER_TTL
        pause_s = interval_s
        while True:
            await asyncio.sleep(min(pause_s, max(0.0, self._remaining_s())))
            asked_at_ns = self._now_ns()
            try:
                async with asyncio.timeout(max(0.001, self._remaining_s())):
                    await self._store.renew(lease)
            except Fenced:
                raise
            except (Unavailable, TimeoutError):
                if self._remaining_s() <= 0:
                    return
                pause_s = interval_s / 4
                continue
            if self._remaining_s() <= 0:
                return
            pause_s = interval_s
            self._until_ns = self._end_of(asked_at_ns)
            self._office.extend(self._until_ns)

    async def _save(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(self._checkpoint_interval_s)
            try:
                async with asyncio.timeout(self._ttl_ms / 1000):
                    await self._store.save_checkpoint(lease, self._office.checkpoint())
            except Fenced:
                raise
            except (Unavailable, TimeoutError) as error:
                log.warning("checkpoint_not_saved", error=str(error))

    def _remaining_s(self) -> float:
        return (self._until_ns - self._now_ns()) / 1e9

    def _leave(self, sentence: str) -> None:
        lease = self._lease
        if lease is None:
            return
        self._kept = _Kept(lease.term, self._office.checkpoint())
        self._lease, self._until_ns = None, 0
        self.owning.clear()
        self._office.leave_office(sentence)

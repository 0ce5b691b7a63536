"""The durable cache map in Postgres: packed snapshots, packed deltas behind them, and the log positions.

Why packed: one row a block caps at about a hundred thousand rows a second; a row per worker and commit that
carries its keys as bytes costs nearly nothing a key, and a snapshot of a worker now and then keeps the deltas few.
The view ``evenhand.cache_map`` shows all of it row by row.

What always holds:

- Deltas and positions are one transaction. It begins by demanding the positions it was made from, whose rows stay
  locked until it ends; a second writer finds another position and is ``Fenced``.
- A key is in at most one delta of a worker and commit (its last word), and a replaced worker is a snapshot.
- ``load`` sees one moment: a repeatable-read snapshot of all tables, of exactly this build's schema.
- A topic whose partition count changed is refused, because workers would have moved between partitions.

If ``commit`` raises ``Unavailable``, the server may have committed all the same: compare ``positions`` with the
commit's before trying again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from evenhand.core.block_key import pack_keys, unpack_keys
from evenhand.core.errors import Fenced, SchemaMismatch
from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import Cleared, Removed, Stored, Tier, WorkerAnnounced, WorkerPosition
from evenhand.ports import KV_TOPIC, LogPosition, MapCommit, MapStore, StoredMap, StoredWorker, WorkerDelta
from evenhand.postgres.database import Database
from evenhand.postgres.migrate import require_schema
from evenhand.wire.kv_codec import decode_kv_message, encode_kv_message

if TYPE_CHECKING:
    import asyncpg

    from evenhand.postgres.database import Connection

# Moves the partitions that stand where they are expected to, and says how many those were.
MOVE_POSITIONS = """
update evenhand.kv_position stored
set next_offset = moved.next_offset, digest_before = moved.digest_before
from unnest($2::integer[], $3::bigint[], $4::bytea[], $5::bigint[], $6::bytea[])
    as moved (partition, expected_offset, expected_digest, next_offset, digest_before)
where stored.topic = $1 and stored.partition = moved.partition and stored.partition_count = $7
    and stored.next_offset = moved.expected_offset and stored.digest_before = moved.expected_digest
"""

# Of two writers that both believe a partition is new, one inserts and the other inserts nothing.
ADD_POSITIONS = """
insert into evenhand.kv_position (topic, partition, partition_count, next_offset, digest_before)
select $1, added.partition, $5, added.next_offset, added.digest_before
from unnest($2::integer[], $3::bigint[], $4::bytea[]) as added (partition, next_offset, digest_before)
on conflict (topic, partition) do nothing
"""

# An announcement is kept until a later one replaces it.
SAVE_WORKERS = """
insert into evenhand.kv_worker as stored (worker_id, epoch, seq, complete, left_pool, announced)
select * from unnest($1::text[], $2::bigint[], $3::bigint[], $4::boolean[], $5::boolean[], $6::bytea[])
on conflict (worker_id) do update
    set epoch = excluded.epoch, seq = excluded.seq, complete = excluded.complete,
        left_pool = excluded.left_pool, announced = coalesce(excluded.announced, stored.announced)
"""

FORGET_DELTAS = "delete from evenhand.kv_delta where worker_id = any($1::text[])"
FORGET_SNAPSHOTS = "delete from evenhand.kv_snapshot where worker_id = any($1::text[])"

SAVE_SNAPSHOTS = """
insert into evenhand.kv_snapshot (worker_id, tier, keys)
select * from unnest($1::text[], $2::smallint[], $3::bytea[])
"""

# Ordinals grow in the order of the arrays: a worker's commits never overlap, and keys within one are disjoint.
APPEND_DELTAS = """
insert into evenhand.kv_delta (worker_id, stored, tier, keys)
select * from unnest($1::text[], $2::boolean[], $3::smallint[], $4::bytea[])
"""

LOAD_POSITIONS = """
select partition, partition_count, next_offset, digest_before from evenhand.kv_position
where topic = $1 order by partition
"""
LOAD_WORKERS = """
select worker_id, epoch, seq, complete, left_pool, announced from evenhand.kv_worker order by worker_id
"""
LOAD_SNAPSHOTS = "select worker_id, tier, keys from evenhand.kv_snapshot order by worker_id, tier"
LOAD_DELTAS = "select worker_id, stored, tier, keys from evenhand.kv_delta order by worker_id, ordinal"


@dataclass(frozen=True, slots=True)
class _Net:
    """What one worker's delta comes to: disjoint keys by tier."""

    replaced: bool
    stored: Mapping[Tier, Sequence[int]]
    removed: Mapping[Tier, Sequence[int]]


def _net(delta: WorkerDelta) -> _Net:
    """Each key's last word. What cancels out is not among the operations already, by the fold."""
    replaced = delta.replaced
    changes: dict[Tier, dict[int, bool]] = {}
    for operation in delta.operations:
        match operation:
            case Cleared():
                replaced = True
                changes.clear()
            case Stored(keys, tier) | Removed(keys, tier):
                stored = isinstance(operation, Stored)
                tier_changes = changes.setdefault(tier, {})
                tier_changes.update(dict.fromkeys(keys, stored))
            case _:
                assert_never(operation)
    return _Net(
        replaced,
        {tier: [key for key, stored in found.items() if stored] for tier, found in changes.items()},
        {}
        if replaced
        else {tier: [key for key, stored in found.items() if not stored] for tier, found in changes.items()},
    )


def _nowhere(_: str) -> None:
    """A fault point that is not armed."""


class PostgresMapStore(MapStore):
    """``MapStore`` in Postgres, for one topic of a fixed number of partitions."""

    def __init__(
        self,
        database: Database,
        partition_count: int,
        topic: str = KV_TOPIC,
        fault_point: Callable[[str], None] = _nowhere,
    ) -> None:
        """``fault_point`` is told where in a commit it is, so that a test may end the process just there."""
        self._database = database
        self._partition_count = partition_count
        self._topic = topic
        self._fault_point = fault_point

    async def load(self) -> StoredMap:
        async with self._database.transaction(snapshot=True) as connection:
            await require_schema(connection)
            positions = await self._positions(connection)
            workers = await connection.fetch(LOAD_WORKERS)
            snapshots = await connection.fetch(LOAD_SNAPSHOTS)
            deltas = await connection.fetch(LOAD_DELTAS)
        held = _held(snapshots, deltas)
        delta_rows: dict[str, int] = {}
        for row in deltas:
            delta_rows[row["worker_id"]] = delta_rows.get(row["worker_id"], 0) + 1
        return StoredMap(
            workers=tuple(
                StoredWorker(
                    worker_id=WorkerId(row["worker_id"]),
                    position=WorkerPosition(
                        Epoch(row["epoch"]), Seq(row["seq"]), row["complete"], row["left_pool"]
                    ),
                    announced=_announced(row["worker_id"], row["announced"]),
                    held=tuple(sorted(held.get(row["worker_id"], {}).items())),
                    delta_rows=delta_rows.get(row["worker_id"], 0),
                )
                for row in workers
            ),
            positions=positions,
        )

    async def positions(self) -> Mapping[int, LogPosition]:
        async with self._database.connection() as connection:
            return await self._positions(connection)

    async def commit(self, commit: MapCommit) -> None:
        nets = [(delta, _net(delta)) for delta in commit.deltas]
        self._fault_point("before-begin")
        async with self._database.transaction() as connection:
            await self._move_positions(connection, commit)
            await self._save_workers(connection, commit.deltas)
            await self._replace(connection, [(delta.worker_id, net) for delta, net in nets if net.replaced])
            await self._append(connection, [(delta.worker_id, net) for delta, net in nets if not net.replaced])
            self._fault_point("before-commit")
        self._fault_point("after-commit")

    async def _positions(self, connection: "Connection") -> Mapping[int, LogPosition]:
        rows = await connection.fetch(LOAD_POSITIONS, self._topic)
        for row in rows:
            if row["partition_count"] != self._partition_count:
                raise SchemaMismatch(
                    f"The cache map was made from {row['partition_count']} partitions of {self._topic}, which has "
                    f"{self._partition_count}: a worker's partition must never change."
                )
        return {row["partition"]: LogPosition(row["next_offset"], row["digest_before"]) for row in rows}

    async def _move_positions(self, connection: "Connection", commit: MapCommit) -> None:
        moved = [(p, commit.expected[p], at) for p, at in sorted(commit.positions.items()) if p in commit.expected]
        added = [(p, at) for p, at in sorted(commit.positions.items()) if p not in commit.expected]
        done = 0
        if moved:
            said = await connection.execute(
                MOVE_POSITIONS,
                self._topic,
                [partition for partition, _, _ in moved],
                [expected.next_offset for _, expected, _ in moved],
                [expected.digest_before for _, expected, _ in moved],
                [at.next_offset for _, _, at in moved],
                [at.digest_before for _, _, at in moved],
                self._partition_count,
            )
            done += int(said.rsplit(" ", 1)[1])
        if added:
            said = await connection.execute(
                ADD_POSITIONS,
                self._topic,
                [partition for partition, _ in added],
                [at.next_offset for _, at in added],
                [at.digest_before for _, at in added],
                self._partition_count,
            )
            done += int(said.rsplit(" ", 1)[1])
        if done != len(commit.positions):
            raise Fenced(f"Another state service has moved the positions of {self._topic} in this database.")

    async def _save_workers(self, connection: "Connection", deltas: Sequence[WorkerDelta]) -> None:
        if not deltas:
            return
        await connection.execute(
            SAVE_WORKERS,
            [delta.worker_id for delta in deltas],
            [delta.position.epoch for delta in deltas],
            [delta.position.seq for delta in deltas],
            [delta.position.complete for delta in deltas],
            [delta.position.left for delta in deltas],
            [encode_kv_message(delta.announced) if delta.announced else None for delta in deltas],
        )

    async def _replace(self, connection: "Connection", nets: Sequence[tuple[WorkerId, _Net]]) -> None:
        if not nets:
            return
        workers = [worker_id for worker_id, _ in nets]
        await connection.execute(FORGET_DELTAS, workers)
        await connection.execute(FORGET_SNAPSHOTS, workers)
        self._fault_point("inside-compaction")
        rows = [(w, tier, keys) for w, net in nets for tier, keys in sorted(net.stored.items()) if keys]
        if rows:
            await connection.execute(
                SAVE_SNAPSHOTS,
                [worker_id for worker_id, _, _ in rows],
                [int(tier) for _, tier, _ in rows],
                [pack_keys(keys) for _, _, keys in rows],
            )

    async def _append(self, connection: "Connection", nets: Sequence[tuple[WorkerId, _Net]]) -> None:
        rows = [
            (worker_id, stored, tier, keys)
            for worker_id, net in nets
            for stored, by_tier in ((True, net.stored), (False, net.removed))
            for tier, keys in sorted(by_tier.items())
            if keys
        ]
        if rows:
            await connection.execute(
                APPEND_DELTAS,
                [worker_id for worker_id, _, _, _ in rows],
                [stored for _, stored, _, _ in rows],
                [int(tier) for _, _, tier, _ in rows],
                [pack_keys(keys) for _, _, _, keys in rows],
            )
        self._fault_point("after-deltas")


def _held(
    snapshots: Iterable["asyncpg.Record"], deltas: Iterable["asyncpg.Record"]
) -> Mapping[str, Mapping[Tier, bytes]]:
    """Packed keys by worker and tier; what has no delta stays the bytes it is."""
    held: dict[str, dict[Tier, bytes]] = {}
    for row in snapshots:
        held.setdefault(row["worker_id"], {})[Tier(row["tier"])] = row["keys"]
    changed: dict[tuple[str, Tier], dict[int, None]] = {}
    for row in deltas:
        place = row["worker_id"], Tier(row["tier"])
        keys = changed.get(place)
        if keys is None:
            snapshot = held.get(place[0], {}).get(place[1], b"")
            keys = changed[place] = dict.fromkeys(unpack_keys(snapshot))
        if row["stored"]:
            keys.update(dict.fromkeys(unpack_keys(row["keys"])))
        else:
            for key in unpack_keys(row["keys"]):
                keys.pop(key, None)
    for (worker_id, tier), keys in changed.items():
        if keys:
            held.setdefault(worker_id, {})[tier] = pack_keys(keys)
        else:
            held.get(worker_id, {}).pop(tier, None)
    return held


def _announced(worker_id: str, payload: bytes | None) -> WorkerAnnounced | None:
    if payload is None:
        return None
    message = decode_kv_message(worker_id.encode(), payload)
    assert isinstance(message, WorkerAnnounced), "kv_worker.announced holds another message"
    return message

-- The durable state of Evenhand: the cache map, the log positions it stands for, who owns a pool, and who may ask.
-- Forward-only; safe for the version before (there is none).

create schema if not exists evenhand;

-- Which migrations have run here; written by `evenhand migrate` in the same transaction as each of them.
create table if not exists evenhand.schema_version (
    version     integer primary key,
    name        text not null,
    sha256      bytea not null,
    applied_at  timestamptz not null default now()
);

-- Pools: what all their workers have in common. The first worker to announce itself may define one.
create table evenhand.pool (
    pool_id            text primary key,
    model              text not null,
    block_size_tokens  integer not null check (block_size_tokens > 0),
    key_scheme         text not null,
    salt_generation    integer not null default 1
);

-- Tenants: the flat part of what administrators say of them.
create table evenhand.tenant (
    tenant_id         text primary key,
    weight            double precision not null default 1 check (weight > 0 and weight < 'infinity'),
    concurrency_max   integer not null default 0 check (concurrency_max >= 0),
    queue_length_max  integer not null default 1000 check (queue_length_max > 0),
    queue_bytes_max   bigint not null default 67108864 check (queue_bytes_max > 0),
    cache_domain      text not null default '',
    state             text not null default 'active' check (state in ('active', 'draining', 'suspended'))
);

-- API keys: only the SHA-256 of a key is kept; the prefix finds it for people.
create table evenhand.api_key (
    key_sha256  bytea primary key check (length(key_sha256) = 32),
    key_prefix  text not null,
    principal   text not null,
    role        text not null check (role in ('admin', 'auditor', 'service')),
    tenants     text[] not null default '{}',
    gateway     boolean not null default false,
    created_at  timestamptz not null default now(),
    expires_at  timestamptz,
    revoked_at  timestamptz
);

-- Grows with every change of pool, tenant or api_key, so that readers poll one row.
create table evenhand.directory_revision (
    single_row  boolean primary key default true check (single_row),
    revision    bigint not null
);
insert into evenhand.directory_revision (revision) values (1);

create function evenhand.bump_directory_revision() returns trigger language plpgsql as $$
begin
    update evenhand.directory_revision set revision = revision + 1;
    perform pg_notify('evenhand_directory', '');
    return null;
end $$;

create trigger pool_changed after insert or update or delete on evenhand.pool
    for each statement execute function evenhand.bump_directory_revision();
create trigger tenant_changed after insert or update or delete on evenhand.tenant
    for each statement execute function evenhand.bump_directory_revision();
create trigger api_key_changed after insert or update or delete on evenhand.api_key
    for each statement execute function evenhand.bump_directory_revision();

-- One row a partition of evenhand.kv.v1: the next offset to fold, and the digest of the record before it.
-- Half-filled pages let rows that every commit touches be rewritten where they are.
create table evenhand.kv_position (
    topic            text not null,
    partition        integer not null,
    partition_count  integer not null,
    next_offset      bigint not null,
    digest_before    bytea not null,
    primary key (topic, partition)
) with (fillfactor = 50);

-- One row a worker: how far its events are folded, and what it last announced. A worker that left is a tombstone.
create table evenhand.kv_worker (
    worker_id  text primary key,
    epoch      bigint not null,
    seq        bigint not null,
    complete   boolean not null,
    left_pool  boolean not null default false,
    announced  bytea
) with (fillfactor = 50);

-- Everything a worker held on a tier as of some batch: keys of 8 bytes, big-endian, packed, each once.
create table evenhand.kv_snapshot (
    worker_id  text not null references evenhand.kv_worker on delete cascade,
    tier       smallint not null,
    keys       bytea not null,
    primary key (worker_id, tier)
);
alter table evenhand.kv_snapshot alter column keys set storage external;

-- What happened to a worker since its snapshot, in order: packed keys stored (+) or removed (-).
create table evenhand.kv_delta (
    worker_id  text not null,
    ordinal    bigint not null generated always as identity,
    stored     boolean not null,
    tier       smallint not null,
    keys       bytea not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
create index kv_delta_worker on evenhand.kv_delta (worker_id, ordinal);

-- Packed keys to rows, in order. Keys are shown as signed 64-bit integers, as SQL has no unsigned ones.
create function evenhand.unpack_keys(keys bytea) returns table (place integer, key bigint)
language sql immutable parallel safe as $$
    select i, ('x' || encode(substr(keys, i * 8 + 1, 8), 'hex'))::bit(64)::bigint
    from generate_series(0, length(keys) / 8 - 1) as i
$$;

-- The cache map, row by row: which worker holds which block key on which tier.
create view evenhand.cache_map as
with change as (
    select s.worker_id, s.tier, u.key, true as stored, 0::bigint as ordinal, u.place
    from evenhand.kv_snapshot s, evenhand.unpack_keys(s.keys) u
    union all
    select d.worker_id, d.tier, u.key, d.stored, d.ordinal, u.place
    from evenhand.kv_delta d, evenhand.unpack_keys(d.keys) u
), last_change as (
    select distinct on (worker_id, tier, key) worker_id, tier, key, stored
    from change
    order by worker_id, tier, key, ordinal desc, place desc
)
select worker_id, tier, key from last_change where stored;

-- Who owns a pool. The term grows with every change of owner; whoever holds an older term is fenced off.
create table evenhand.scheduler_lease (
    pool_id     text primary key,
    holder      text not null,
    term        bigint not null,
    expires_at  timestamptz not null
);

-- Clocks and open tickets of a pool's scheduler, replaced every second under its lease.
create table evenhand.scheduler_checkpoint (
    pool_id   text primary key,
    term      bigint not null,
    payload   bytea not null,
    saved_at  timestamptz not null default now()
);

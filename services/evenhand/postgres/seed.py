"""The seed file: pools, tenants and API keys from YAML, for a first start and for development.

::

    pools:
      - {pool_id: chat, model: llama, block_size_tokens: 16}
    tenants:
      - {tenant_id: acme, weight: 2}
    api_keys:
      - {principal: acme-app, tenants: [acme]}                          # generated, shown once
      - {principal: gateway, role: service, tenants: [acme], gateway: true, key: dev-key-of-the-gateway}
      - {principal: front, tenants: ["*"], gateway: true}               # for every tenant

Seeding again is harmless: what is named is brought to what the file says, what is not named stays (a key that the
file no longer gives, too), and a key is generated only for a principal that has no live one. A pool that exists
with another model, block size or key scheme is refused, because its workers' keys would mean something else.
"""

import argparse
import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from evenhand.core.errors import InvalidConfig
from evenhand.core.facts import WEIGHT_MAX, WEIGHT_MIN
from evenhand.options import add_dsn, require_given
from evenhand.ports import ALL_TENANTS
from evenhand.postgres.database import Database, DatabaseConfig

if TYPE_CHECKING:
    import asyncpg

    from evenhand.postgres.database import Connection

    AnyConnection = Connection | asyncpg.Connection[asyncpg.Record]

KEY_PREFIX = "eh_"
KEY_CHARACTERS_MIN = 16
"""A key given in clear must be this long: it is hashed without a salt."""
SHOWN_CHARACTERS = 6
"""Of a key these are stored in clear, so that people can tell keys apart."""
SEED_BYTES_MAX = 4 * 1024 * 1024

SAVE_TENANT = """
insert into evenhand.tenant
    (tenant_id, weight, concurrency_max, queue_length_max, queue_bytes_max, cache_domain, state)
values ($1, $2, $3, $4, $5, $6, $7)
on conflict (tenant_id) do update
    set weight = excluded.weight, concurrency_max = excluded.concurrency_max,
        queue_length_max = excluded.queue_length_max, queue_bytes_max = excluded.queue_bytes_max,
        cache_domain = excluded.cache_domain, state = excluded.state
"""

# A pool's meaning never changes under its workers; only the salt generation moves.
SAVE_POOL = """
insert into evenhand.pool as stored (pool_id, model, block_size_tokens, key_scheme, salt_generation)
values ($1, $2, $3, $4, $5)
on conflict (pool_id) do update set salt_generation = excluded.salt_generation
    where stored.model = excluded.model and stored.block_size_tokens = excluded.block_size_tokens
        and stored.key_scheme = excluded.key_scheme
returning pool_id
"""

SAVE_KEY = """
insert into evenhand.api_key (key_sha256, key_prefix, principal, role, tenants, gateway, expires_at)
values ($1, $2, $3, $4, $5, $6, $7)
on conflict (key_sha256) do update
    set principal = excluded.principal, role = excluded.role, tenants = excluded.tenants,
        gateway = excluded.gateway, expires_at = excluded.expires_at
"""

# Rights of a principal whose key was generated before; its live keys follow the file.
UPDATE_PRINCIPAL = """
update evenhand.api_key set role = $2, tenants = $3, gateway = $4, expires_at = $5
where principal = $1 and revoked_at is null and (expires_at is null or expires_at > clock_timestamp())
"""

UNKNOWN_TENANTS = """
select named from unnest($1::text[]) as named
where not exists (select from evenhand.tenant where tenant_id = named) order by named
"""


def _named(text: str) -> str:
    if "\0" in text or text != text.strip():
        raise ValueError("a name must not begin or end with a space or hold a zero byte")
    return text


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_named)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SeedPool(_Strict):
    """What all workers of a pool have in common."""

    pool_id: Name
    model: Name
    block_size_tokens: int = Field(ge=1, le=65_536)
    key_scheme: Name = "evenhand.block.v1"
    salt_generation: int = Field(default=1, ge=1, le=2**31 - 1)


def _no_wildcard(text: str) -> str:
    if text == ALL_TENANTS:
        raise ValueError(f"{ALL_TENANTS} stands for all tenants and names none")
    return text


class SeedTenant(_Strict):
    """A tenant; the meaning of each field is that of ``core.facts.TenantSpec``."""

    tenant_id: Annotated[Name, AfterValidator(_no_wildcard)]
    weight: Annotated[float, Field(ge=WEIGHT_MIN, le=WEIGHT_MAX, allow_inf_nan=False)] = 1.0
    concurrency_max: int = Field(default=0, ge=0, le=2**31 - 1)
    queue_length_max: int = Field(default=1_000, ge=1, le=2**31 - 1)
    queue_bytes_max: int = Field(default=64 * 1024 * 1024, ge=1, le=2**63 - 1)
    cache_domain: Annotated[str, Field(max_length=200), AfterValidator(_named)] = ""
    state: Literal["active", "draining", "suspended"] = "active"


class SeedApiKey(_Strict):
    """A credential; without ``key`` one is generated and told once."""

    principal: Name
    role: Literal["admin", "auditor", "service"] = "service"
    tenants: list[Name] = []
    gateway: bool = False
    key: Annotated[str, Field(min_length=KEY_CHARACTERS_MIN, max_length=200), AfterValidator(_named)] | None = None
    expires_at: AwareDatetime | None = None

    @model_validator(mode="after")
    def _all_tenants_need_a_gateway(self) -> Self:
        if ALL_TENANTS in self.tenants and not self.gateway:
            raise ValueError(f"only a gateway may act for all tenants ({ALL_TENANTS})")
        return self


class SeedFile(_Strict):
    """The whole file; every part may be left out."""

    pools: list[SeedPool] = []
    tenants: list[SeedTenant] = []
    api_keys: list[SeedApiKey] = []


@dataclass(frozen=True, slots=True)
class GeneratedKey:
    """A key that exists in clear only here."""

    principal: str
    key: str

    def __repr__(self) -> str:
        return f"GeneratedKey(principal={self.principal!r})"


@dataclass(frozen=True, slots=True)
class SeedResult:
    """What was written."""

    pools: int
    tenants: int
    api_keys: int
    generated: tuple[GeneratedKey, ...]


def key_sha256(key: str) -> bytes:
    """What is stored of an API key."""
    return hashlib.sha256(key.encode()).digest()


def read_seed(path: Path) -> SeedFile:
    """Parse a seed file; raises ``InvalidConfig`` with one sentence that names what is wrong in it."""
    try:
        if path.stat().st_size > SEED_BYTES_MAX:
            raise InvalidConfig(f"The seed file {path} is larger than {SEED_BYTES_MAX} bytes.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"The seed file {path} cannot be read: {error}.") from error
    return parse_seed(text, str(path))


def parse_seed(text: str, name: str = "seed") -> SeedFile:
    """As ``read_seed``, of the file's text; ``name`` is what the sentence calls it."""
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        told = " ".join(str(error).split())
        raise InvalidConfig(f"The seed file {name} is not YAML: {told}.") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise InvalidConfig(f"The seed file {name} must be a mapping of pools, tenants and api_keys.")
    try:
        seed = SeedFile.model_validate(content)
    except ValidationError as error:
        # Never the value itself: it may be a key.
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        what = (
            "is no setting here"
            if first["type"] == "extra_forbidden"
            else f"is wrong: {first['msg'].removeprefix('Value error, ')}"
        )
        raise InvalidConfig(f"In the seed file {name}, {place} {what}.") from None
    _require_unique(name, "pools", "pool_id", [pool.pool_id for pool in seed.pools])
    _require_unique(name, "tenants", "tenant_id", [tenant.tenant_id for tenant in seed.tenants])
    _require_unique(name, "api_keys", "principal", [key.principal for key in seed.api_keys])
    given = [key.key for key in seed.api_keys if key.key is not None]
    if len(set(given)) < len(given):
        raise InvalidConfig(f"In the seed file {name}, two api_keys have the same key.")
    return seed


def _require_unique(name: str, part: str, field: str, values: Sequence[str]) -> None:
    for place, value in enumerate(values):
        if value in values[:place]:
            raise InvalidConfig(f"In the seed file {name}, {part} has two entries with {field} {value!r}.")


async def seed_directory(connection: "AnyConnection", seed: SeedFile) -> SeedResult:
    """Bring pools, tenants and keys to what the file says, in one transaction.

    Raises ``InvalidConfig`` in one sentence if a pool exists with another meaning or a key names an unknown
    tenant; then nothing is changed.
    """
    generated = []
    async with connection.transaction():
        for pool in seed.pools:
            values = pool.pool_id, pool.model, pool.block_size_tokens, pool.key_scheme, pool.salt_generation
            if await connection.fetchval(SAVE_POOL, *values) is None:
                raise InvalidConfig(
                    f"Pool {pool.pool_id!r} exists with another model, block size or key scheme than the seed's."
                )
        for tenant in seed.tenants:
            await connection.execute(
                SAVE_TENANT,
                tenant.tenant_id,
                tenant.weight,
                tenant.concurrency_max,
                tenant.queue_length_max,
                tenant.queue_bytes_max,
                tenant.cache_domain,
                tenant.state,
            )
        for api_key in seed.api_keys:
            named = [tenant_id for tenant_id in api_key.tenants if tenant_id != ALL_TENANTS]
            unknown = [row[0] for row in await connection.fetch(UNKNOWN_TENANTS, named)]
            if unknown:
                raise InvalidConfig(f"The key of {api_key.principal!r} names {unknown[0]!r}, which is no tenant.")
            key = await _save_key(connection, api_key)
            if key is not None:
                generated.append(GeneratedKey(api_key.principal, key))
    return SeedResult(len(seed.pools), len(seed.tenants), len(seed.api_keys), tuple(generated))


async def _save_key(connection: "AnyConnection", api_key: SeedApiKey) -> str | None:
    """Store one key; returns it if it was generated here."""
    rights: tuple[str, list[str], bool, datetime | None] = (
        api_key.role,
        list(api_key.tenants),
        api_key.gateway,
        api_key.expires_at,
    )
    key = api_key.key
    if key is None:
        said = await connection.execute(UPDATE_PRINCIPAL, api_key.principal, *rights)
        if said != "UPDATE 0":
            return None
        key = KEY_PREFIX + secrets.token_urlsafe(32)
    shown = key[: len(KEY_PREFIX) + SHOWN_CHARACTERS] if key.startswith(KEY_PREFIX) else key[:SHOWN_CHARACTERS]
    await connection.execute(SAVE_KEY, key_sha256(key), shown, api_key.principal, *rights)
    return None if api_key.key is not None else key


async def _seed(dsn: str, seed: SeedFile) -> SeedResult:
    async with (
        await Database.open(DatabaseConfig(dsn, "seed", connections_max=1)) as database,
        database.connection() as connection,
    ):
        return await seed_directory(connection, seed)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options of the command line; ends the process with usage and code 2 where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="evenhand seed", description="Fill pools, tenants and API keys from YAML."
    )
    add_dsn(parser)
    parser.add_argument("file", type=Path, help="the seed file")
    arguments = parser.parse_args(argv)
    require_given(parser, arguments, "dsn")
    return arguments


def main(argv: Sequence[str]) -> int:
    """``evenhand seed --dsn … FILE``."""
    arguments = parse(argv)
    result = asyncio.run(_seed(arguments.dsn, read_seed(arguments.file)))
    print(f"seeded {result.pools} pools, {result.tenants} tenants and {result.api_keys} API keys")
    for generated in result.generated:
        print(f"key of {generated.principal} (shown only this once): {generated.key}")
    return 0

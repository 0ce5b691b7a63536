"""One suite over every ``Directory``: in memory and in Postgres; and the seed file that fills the real one."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from evenhand.core.errors import EvenhandError, InvalidConfig
from evenhand.core.facts import TenantSpec, TenantState
from evenhand.core.ids import PoolId, TenantId
from evenhand.memory import MemoryDirectory
from evenhand.ports import ALL_TENANTS, Directory, PoolSpec, Principal
from evenhand.postgres.database import Database, DatabaseConfig
from evenhand.postgres.directory import PostgresDirectory
from evenhand.postgres.seed import (
    SeedFile,
    SeedResult,
    key_sha256,
    main,
    parse_seed,
    read_seed,
    seed_directory,
)

KEY = "dev-key-of-the-gateway"
SEED = f"""
pools:
  - {{pool_id: chat, model: llama, block_size_tokens: 16, salt_generation: 2}}
tenants:
  - {{tenant_id: acme, weight: 2, concurrency_max: 7, queue_length_max: 5, queue_bytes_max: 900, state: draining}}
  - {{tenant_id: bell, cache_domain: shared}}
api_keys:
  - {{principal: gateway, role: service, tenants: [acme, bell], gateway: true, key: {KEY}}}
"""
TENANTS = (
    TenantSpec(TenantId("acme"), 2.0, 7, 5, 900, "", TenantState.DRAINING),
    TenantSpec(TenantId("bell"), cache_domain="shared"),
)
POOL = PoolSpec(PoolId("chat"), "llama", 16, "evenhand.block.v1", 2)
GATEWAY = Principal("gateway", "service", (TenantId("acme"), TenantId("bell")), True)


async def seed(database: Database, text: str) -> SeedResult:
    async with database.connection() as connection:
        return await seed_directory(connection, parse_seed(text))


@pytest.fixture
async def database(postgres_dsn: str) -> AsyncIterator[Database]:
    async with await Database.open(DatabaseConfig(postgres_dsn, "test")) as opened:
        yield opened


@pytest.fixture(params=["memory", "postgres"])
async def directory(request: pytest.FixtureRequest) -> AsyncIterator[Directory]:
    """A directory with two tenants, a pool and a gateway in it."""
    if request.param == "memory":
        memory = MemoryDirectory()
        for tenant in TENANTS:
            memory.set_tenant(tenant)
        memory.set_pool(POOL)
        memory.set_principal(key_sha256(KEY), GATEWAY)
        yield memory
        return
    dsn = request.getfixturevalue("postgres_dsn")
    async with await Database.open(DatabaseConfig(dsn, "test")) as database:
        await seed(database, SEED)
        yield PostgresDirectory(database)


async def test_tenants_pools_and_principals_are_told(directory: Directory) -> None:
    assert await directory.tenants() == TENANTS
    assert await directory.pools() == (POOL,)
    assert await directory.principal_of(hashlib.sha256(KEY.encode()).digest()) == GATEWAY
    assert await directory.principal_of(key_sha256("another-key")) is None


async def test_the_first_worker_defines_a_pool(directory: Directory) -> None:
    before = await directory.revision()
    mine = PoolSpec(PoolId("code"), "coder", 32, "evenhand.block.v1")
    assert await directory.register_pool(mine) == mine
    assert await directory.revision() > before
    before = await directory.revision()
    theirs = PoolSpec(PoolId("code"), "other", 16, "evenhand.block.v1")
    assert await directory.register_pool(theirs) == mine
    assert await directory.register_pool(mine) == mine
    assert await directory.pools() == (POOL, mine)
    assert await directory.revision() == before


# The seed file, and Postgres alone


async def test_seeding_again_brings_what_is_named_to_what_is_said(database: Database) -> None:
    directory = PostgresDirectory(database)
    await seed(database, SEED)
    before = await directory.revision()
    result = await seed(database, "tenants: [{tenant_id: acme, weight: 3}, {tenant_id: cora}]")
    assert (result.pools, result.tenants, result.api_keys, result.generated) == (0, 2, 0, ())
    assert await directory.revision() > before
    assert await directory.tenants() == (
        TenantSpec(TenantId("acme"), 3.0),
        TENANTS[1],
        TenantSpec(TenantId("cora")),
    )


async def test_a_key_is_generated_once_and_only_its_hash_is_stored(database: Database) -> None:
    text = "tenants: [{tenant_id: acme}]\napi_keys: [{principal: app, tenants: [acme]}]"
    result = await seed(database, text)
    (generated,) = result.generated
    assert generated.key not in repr(result)
    principal = await PostgresDirectory(database).principal_of(key_sha256(generated.key))
    assert principal == Principal("app", "service", (TenantId("acme"),))
    assert (await seed(database, text)).generated == ()
    await seed(database, text.replace("principal: app", "principal: app, role: auditor"))
    principal = await PostgresDirectory(database).principal_of(key_sha256(generated.key))
    assert principal is not None
    assert principal.role == "auditor"
    async with database.connection() as connection:
        rows = await connection.fetch("select stored::text from evenhand.api_key stored")
    assert len(rows) == 1
    assert generated.key not in rows[0][0]


async def test_expired_and_revoked_keys_belong_to_nobody(database: Database) -> None:
    directory = PostgresDirectory(database)
    await seed(database, SEED)
    change = "update evenhand.api_key set"
    async with database.connection() as connection:
        await connection.execute(f"{change} expires_at = now() + interval '1 hour'")
    principal = await directory.principal_of(key_sha256(KEY))
    assert principal is not None
    assert principal.expires_at_ms is not None
    for made_void in ("expires_at = now() - interval '1 s'", "expires_at = null, revoked_at = now()"):
        async with database.connection() as connection:
            await connection.execute(f"{change} {made_void}")
        assert await directory.principal_of(key_sha256(KEY)) is None


async def test_a_seed_is_all_or_nothing(database: Database) -> None:
    await seed(database, SEED)
    for wrong, sentence in (
        ("{pool_id: chat, model: llama, block_size_tokens: 32}", "Pool 'chat' exists with another model"),
        ("{pool_id: chat, model: mistral, block_size_tokens: 16}", "Pool 'chat' exists with another model"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            await seed(database, f"pools: [{{pool_id: a, model: m, block_size_tokens: 1}}, {wrong}]")
    with pytest.raises(InvalidConfig, match="The key of 'app' names 'nobody', which is no tenant"):
        await seed(database, "tenants: [{tenant_id: x}]\napi_keys: [{principal: app, tenants: [nobody]}]")
    assert await PostgresDirectory(database).pools() == (POOL,)
    assert await PostgresDirectory(database).tenants() == TENANTS


async def test_a_gateway_for_all_tenants_can_be_seeded(database: Database) -> None:
    key = "dev-key-of-the-front-door"
    await seed(database, f"api_keys: [{{principal: front, tenants: ['*'], gateway: true, key: {key}}}]")
    principal = await PostgresDirectory(database).principal_of(key_sha256(key))
    assert principal == Principal("front", "service", (ALL_TENANTS,), True)


def test_the_command_seeds_and_shows_a_generated_key_once(
    postgres_dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "seed.yaml"
    file.write_text("tenants: [{tenant_id: acme}]\napi_keys: [{principal: app, tenants: [acme]}]")
    assert main(["--dsn", postgres_dsn, str(file)]) == 0
    said = capsys.readouterr().out
    assert "seeded 0 pools, 1 tenants and 1 API keys" in said
    assert "key of app (shown only this once): eh_" in said
    assert main(["--dsn", postgres_dsn, str(file)]) == 0
    assert "eh_" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tenant: []", "tenant is no setting here"),
        ("tenants: [{tenant_id: a, wieght: 2}]", r"tenants\.0\.wieght is no setting here"),
        ("tenants: [{tenant_id: a, weight: 0}]", r"tenants\.0\.weight is wrong: Input should be greater than"),
        ("tenants: [{tenant_id: a, weight: 5.0e-324}]", r"tenants\.0\.weight is wrong: Input should be greater"),
        ("tenants: [{tenant_id: a, weight: 1.0e+300}]", r"tenants\.0\.weight is wrong: Input should be less than"),
        ("tenants: [{tenant_id: a, weight: .nan}]", r"tenants\.0\.weight is wrong"),
        ("tenants: [{tenant_id: a, weight: .inf}]", r"tenants\.0\.weight is wrong"),
        ("tenants: [{tenant_id: a, weight: '2'}]", r"tenants\.0\.weight is wrong"),
        ("tenants: [{tenant_id: a, concurrency_max: -1}]", r"tenants\.0\.concurrency_max is wrong"),
        ("tenants: [{tenant_id: a, state: asleep}]", r"tenants\.0\.state is wrong"),
        ("tenants: [{tenant_id: ' a'}]", r"tenants\.0\.tenant_id is wrong"),
        ("tenants: [{tenant_id: ''}]", r"tenants\.0\.tenant_id is wrong"),
        ("tenants: [{weight: 1}]", r"tenants\.0\.tenant_id is wrong: Field required"),
        ("tenants: [{tenant_id: a}, {tenant_id: a}]", "tenants has two entries with tenant_id 'a'"),
        ("pools: [{pool_id: a, model: m, block_size_tokens: 0}]", r"pools\.0\.block_size_tokens is wrong"),
        ("api_keys: [{principal: a, key: short}]", r"api_keys\.0\.key is wrong"),
        ("api_keys: [{principal: a, role: root}]", r"api_keys\.0\.role is wrong"),
        ("tenants: [{tenant_id: '*'}]", r"tenants\.0\.tenant_id is wrong: \* stands for all tenants"),
        ("api_keys: [{principal: a, tenants: ['*']}]", r"api_keys\.0 is wrong: only a gateway may act for all"),
        (
            f"api_keys: [{{principal: a, key: {KEY}}}, {{principal: b, key: {KEY}}}]",
            "two api_keys have the same key",
        ),
        ("[1, 2]", "must be a mapping"),
        ("tenants: [", "is not YAML"),
        ("tenants: {acme: 1}", "tenants is wrong"),
    ],
)
def test_a_bad_seed_is_one_sentence_that_names_the_thing(text: str, sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence) as caught:
        parse_seed(text, "seed.yaml")
    assert "seed.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_bad_key_is_not_told(tmp_path: Path) -> None:
    file = tmp_path / "seed.yaml"
    file.write_text("api_keys: [{principal: a, key: hunter2-hunter}]")
    with pytest.raises(EvenhandError) as caught:
        read_seed(file)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_seed(tmp_path / "missing.yaml")
    assert parse_seed("") == SeedFile()

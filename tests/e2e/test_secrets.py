"""Secrets and prompts are found nowhere: planted ones are searched for in everything the system leaves behind.

Searched are the log of every process, every file of the data directory (but the master secret's own, and the
database's, whose rows are looked at instead), every row of every table, every record of every topic, every page,
and what clients are told on errors. Each secret is searched for in each form in which it could have been written.
"""

import asyncio
import base64
import io
import random
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Literal

import asyncpg
import pytest
from tests.fixtures.stack import BLOCK_SIZE, POOL, TENANTS, System, running_system

from evenhand.client import AsyncClient, ClientError
from evenhand.kafka.config import KafkaConfig
from evenhand.kafka.reader import KafkaLogReader
from evenhand.local.stack import keys_by_principal
from evenhand.ports import CONTROL_TOPIC, KV_TOPIC, LogPosition

SEED = 7
WRONG_KEY = "eh_planted_wrong_key_0123456789abcdef"
RUN_TOKENS = 6
"""Token ids in a row that are taken for a piece of the prompt."""
RUN_STEP = 15
BYTE_ORDERS: tuple[Literal["little", "big"], ...] = ("little", "big")
SECRET_FILE = "master.secret"


def forms_of_tokens(prompt: list[int]) -> Iterator[bytes]:
    """Each run of token ids in the ways a program writes numbers."""
    for start in range(0, len(prompt) - RUN_TOKENS, RUN_STEP):
        run = prompt[start : start + RUN_TOKENS]
        for separator in (", ", ",", " "):
            yield separator.join(map(str, run)).encode()
        for order in BYTE_ORDERS:
            for width in (2, 4, 8):
                yield b"".join(token.to_bytes(width, order) for token in run)
        yield b"".join(b"\xcd" + token.to_bytes(2, "big") for token in run)  # MessagePack
        yield b"".join(_varint(token) for token in run)  # Protocol Buffers


def forms_of_text(secret: str) -> Iterator[bytes]:
    """A secret text as it is, and as the bytes that its hexadecimal digits stand for."""
    yield secret.encode()
    yield base64.b64encode(secret.encode()).rstrip(b"=")[:-1]
    try:
        yield bytes.fromhex(secret)
    except ValueError:
        return


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def found(needles: dict[str, list[bytes]], haystack: bytes) -> list[str]:
    """Names of the secrets that are in there, also written as hexadecimal digits."""
    lower = haystack.lower()
    return [
        name
        for name, forms in needles.items()
        if any(form in haystack or form.hex().encode() in lower for form in forms)
    ]


async def use(system: System) -> list[list[int]]:
    """Ask for every tenant, with hits, with an abandoned wait and with refusals; the prompts that were sent."""
    chance = random.Random(SEED)
    prompts = [chance.choices(range(20_000, 30_000), k=BLOCK_SIZE * 4) for _ in range(3 * len(TENANTS))]
    for number, prompt in enumerate(prompts):
        tenant = TENANTS[number % len(TENANTS)]
        await system.ask(tenant, prompt)
        await system.ask(tenant, prompt + prompt[:7])
    return prompts


async def refusals(system: System, prompt: list[int]) -> list[str]:
    """What clients are told when they are refused."""
    told = []
    keys = keys_by_principal(system.stack.generated_keys)
    for key, tokens, output in (
        (WRONG_KEY, prompt, 5),
        (keys["red"], prompt * 200, 5),
        (keys["red"], [-1, *prompt], 5),
        (keys["red"], prompt, 0),
    ):
        async with AsyncClient(system.stack.scheduler_address, pool=POOL, api_key=key) as client:
            with pytest.raises(ClientError) as refused:
                async with client.acquire(tokens=tokens, max_output_tokens=output, timeout=5) as grant:
                    raise AssertionError(f"{len(tokens)} tokens of prompt were granted: {grant}")
            told.append(f"{refused.value} {refused.value!r} {client!r}")
    return told


async def rows(dsn: str) -> bytes:
    """Every table of the product, as the server writes it, in binary and as text."""
    connection = await asyncpg.connect(dsn)
    out = io.BytesIO()
    try:
        tables = await connection.fetch(
            "select table_name from information_schema.tables where table_schema = 'evenhand' order by 1"
        )
        assert {"tenant", "kv_delta", "scheduler_checkpoint", "cache_map"} <= {row[0] for row in tables}
        for (name,) in tables:
            for form in ("binary", "text"):
                await connection.copy_from_query(f'select * from evenhand."{name}"', output=out, format=form)
    finally:
        await connection.close()
    return out.getvalue()


async def records(bootstrap: str) -> bytes:
    """Keys and values of both topics, up to a moment of silence."""
    out = bytearray()
    reader = KafkaLogReader(KafkaConfig.embedded(bootstrap))
    try:
        for topic in (KV_TOPIC, CONTROL_TOPIC):
            start = {number: LogPosition(0) for number in range(await reader.partition_count(topic))}
            batches = reader.read(topic, start)
            async with aclosing(batches):  # type: ignore[type-var]
                try:
                    async with asyncio.timeout(3):
                        async for batch in batches:
                            for record in batch:
                                out += record.key + b"\n" + record.value + b"\n"
                except TimeoutError:
                    continue
    finally:
        await reader.close()
    return bytes(out)


async def pages(system: System) -> bytes:
    out = bytearray()
    for name, port in system.stack.metrics_ports.items():
        for path in ("/metrics", "/status") if name == "scheduler" else ("/metrics", "/ready"):
            async with system.http.get(f"http://127.0.0.1:{port}{path}") as response:
                assert response.status == 200, (name, path)
                out += await response.read()
    return bytes(out)


def files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and path.name != SECRET_FILE and name.parts[:2] != ("database", "pg"):
            yield str(name), path.read_bytes()


@pytest.mark.timeout(240)
async def test_planted_secrets_and_prompts_are_found_nowhere(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    async with running_system(tmp_path, engines=1) as system:
        prompts = await use(system)
        told = await refusals(system, prompts[0])
        await system.rest()
        master = (tmp_path / SECRET_FILE).read_bytes()
        needles = {
            "prompt": [form for prompt in prompts[: len(TENANTS)] for form in forms_of_tokens(prompt)],
            "salt": [form for salt in system.salts.values() for form in forms_of_text(salt)],
            "key": [
                form
                for key in (WRONG_KEY, *keys_by_principal(system.stack.generated_keys).values())
                for form in forms_of_text(key)
            ],
            "master secret": [master, master.strip(), *forms_of_text(master.decode("latin-1").strip())],
        }
        seen = {
            "rows": await rows(system.stack.database.dsn),
            "records": await records(system.stack.broker.bootstrap),
            "pages": await pages(system),
            "answers": "\n".join(told).encode(),
        }
        assert all(len(data) > 200 for data in seen.values()), {name: len(data) for name, data in seen.items()}
    seen |= dict(files(tmp_path))
    logs = [name for name in seen if name.startswith("logs/")]
    assert "database/postgres.log" in seen
    assert {"logs/scheduler.log", "logs/state.log", "logs/edge-engine-0.log"} <= set(logs), logs
    assert {name: names for name, data in seen.items() if (names := found(needles, data))} == {}


def test_the_search_can_find() -> None:
    """Each form in which a secret could have been written is seen."""
    prompt = random.Random(SEED).choices(range(20_000, 30_000), k=40)
    needles = {"prompt": list(forms_of_tokens(prompt)), "salt": list(forms_of_text("ab" * 32))}
    packed = b"".join(token.to_bytes(4, "little") for token in prompt)
    for leak in (str(prompt).encode(), packed, packed.hex().upper().encode(), b"x" + packed[3:]):
        assert found(needles, b"..." + leak + b"...") == ["prompt"]
    for leak in (b"ab" * 32, b"\xab" * 32, b"\\x" + b"ab" * 32):
        assert found(needles, b"..." + leak + b"...") == ["salt"]
    assert not found(needles, str(prompt[:3]).encode() + b"ab" * 8)

"""A reader under a random storm of broker faults always shows one log, whole and in order.

After each fault the tail's current life is compared with a fresh reading of the same broker from its beginning:
in every partition the tail must reach at least as far, and be equal record by record. A reader that mixes two
lives, skips, repeats, or hangs fails. The seed is printed; ``EVENHAND_STORM_SEED`` replays it.
"""

import asyncio
import os
import random
from collections import defaultdict

import pytest

from evenhand.core.errors import Unavailable
from evenhand.kafka import EMBEDDED_PARTITIONS, KafkaConfig, KafkaLogReader, KafkaLogWriter
from evenhand.local.broker import EmbeddedBroker
from evenhand.ports import KV_TOPIC, LogPosition, LogRecord, LogReplaced

ROUNDS = 4
WRITERS = 3
RECOVERY_SECONDS_MAX = 10.0
SEED_VARIABLE = "EVENHAND_STORM_SEED"
START = {number: LogPosition(0) for number in range(EMBEDDED_PARTITIONS)}
Life = dict[int, list[LogRecord]]


async def follow(config: KafkaConfig, lives: list[Life]) -> None:
    """Read for ever; a log that is another one begins another life."""
    reader = KafkaLogReader(config)
    while True:
        try:
            async for batch in reader.read(KV_TOPIC, START):
                for record in batch:
                    lives[-1][record.partition].append(record)
        except LogReplaced:
            lives.append(defaultdict(list))


async def write(config: KafkaConfig, key: bytes, seed: int) -> None:
    writer, chance, number = KafkaLogWriter(config), random.Random(seed), 0
    try:
        while True:
            number += 1
            records = [(key, b"%s/%d/%d" % (key, number, one)) for one in range(chance.randrange(1, 20))]
            try:
                await writer.publish_many(KV_TOPIC, records)
            except Unavailable:
                continue
            await asyncio.sleep(chance.random() * 0.02)
    finally:
        await writer.close()


async def cause(fault: str, broker: EmbeddedBroker, chance: random.Random) -> None:
    wait_s = chance.random() * 0.6
    if fault == "kill":
        await broker.kill()
        await asyncio.sleep(wait_s)
        await broker.restart()
    elif fault == "restart":
        await broker.restart()
    elif fault == "pause":
        await broker.pause()
        await asyncio.sleep(3 * wait_s)
        broker.resume()
    else:
        await broker.restart()
        await asyncio.sleep(wait_s / 6)
        await broker.restart()


async def fresh_reading(config: KafkaConfig) -> Life:
    """What the broker holds, as far as one reading from its beginning came when every writer was heard again."""
    reader, life, heard = KafkaLogReader(config), defaultdict[int, list[LogRecord]](list), set[bytes]()
    async with asyncio.timeout(RECOVERY_SECONDS_MAX):
        async for batch in reader.read(KV_TOPIC, START):
            for record in batch:
                life[record.partition].append(record)
                heard.add(record.key)
            if len(heard) == WRITERS:
                break
    await reader.close()
    return life


def behind(tail: Life, fresh: Life) -> bool:
    return any(len(tail[number]) < len(records) for number, records in fresh.items())


@pytest.mark.timeout(180)
async def test_the_tail_is_always_one_log(embedded_broker: EmbeddedBroker) -> None:
    seed = int(os.environ.get(SEED_VARIABLE, "") or random.SystemRandom().randrange(1_000_000))
    print(f"{SEED_VARIABLE}={seed}")
    chance = random.Random(seed)
    config = KafkaConfig.embedded(embedded_broker.bootstrap, request_timeout_ms=1_000, publish_timeout_ms=1_500)
    lives: list[Life] = [defaultdict(list)]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(follow(config, lives))]
        running += [tasks.create_task(write(config, b"worker-%d" % one, seed + one)) for one in range(WRITERS)]
        for _ in range(ROUNDS):
            await asyncio.sleep(0.2 + chance.random() * 0.5)
            fault = chance.choice(("kill", "restart", "pause", "twice"))
            await cause(fault, embedded_broker, chance)
            fresh = await fresh_reading(config)
            async with asyncio.timeout(RECOVERY_SECONDS_MAX):
                while behind(lives[-1], fresh) or differs(lives[-1], fresh):
                    await asyncio.sleep(0.05)
            print(f"{fault}: {sum(map(len, fresh.values()))} records, life {len(lives)}")
        for task in running:
            task.cancel()


def differs(tail: Life, fresh: Life) -> bool:
    """Whether the tail shows another log than the fresh reading, or has a hole."""
    for number, records in fresh.items():
        seen = tail[number][: len(records)]
        if [record.offset for record in tail[number]] != list(range(len(tail[number]))) or seen != records:
            return True
    return False

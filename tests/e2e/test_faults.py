"""Any one part is killed with ``kill -9`` under load; the system is whole again by itself soon after it is back.

The cases share one system and come one after the other, each from and to a system at rest, so that a later one
also shows that an earlier one left nothing behind.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest
import pytest_asyncio
from tests.fixtures.stack import BLOCK_SIZE, TENANTS, Load, System, kill_process, running_system, until

BACK_SECONDS_MAX = 10.0
"""What the product promises, counted from the part's return."""
PROBES = 3
LOOPS = 2
LOOPS_SCHEDULER = 6
"""More than all workers have slots: tickets of the dead one must not keep the successor from granting."""
SEED = 20

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    async with running_system(tmp_path_factory.mktemp("stack")) as running:
        yield running


async def broker_dies(system: System) -> None:
    broker = system.stack.broker
    before = broker.pid
    kill_process(before)
    await until(lambda: _true(broker.pid != before and broker.running))
    await until(broker.answers)


async def database_dies(system: System) -> None:
    database = system.stack.database
    before = database.pid
    kill_process(before)

    async def answers() -> bool:
        return database.pid not in (None, before) and bool(await system.stored_map())

    await until(answers)


async def state_dies(system: System) -> None:
    await _service_dies(system, "state")


async def scheduler_dies(system: System) -> None:
    await _service_dies(system, "scheduler")


async def edge_dies(system: System) -> None:
    await _service_dies(system, "edge-engine-0")


async def engine_dies(system: System) -> None:
    """It stays away long enough to be given up; what it had under way goes to the other."""
    engine = system.engines[0]
    await engine.kill()
    await until(lambda: _gone(system, engine.name))
    await engine.start()


async def _service_dies(system: System, name: str) -> None:
    service = system.stack.services[name]
    before = service.process.pid
    kill_process(before)
    await until(lambda: _true(service.process.pid != before))
    await until(service.ready)


async def _true(value: bool) -> bool:
    return value


async def _gone(system: System, name: str) -> bool:
    workers = (await system.pool())["workers"]
    return all(worker["worker_id"] != name or worker["state"] != "ready" for worker in workers)


PARTS: dict[str, Callable[[System], Awaitable[None]]] = {
    "broker": broker_dies,
    "postgres": database_dies,
    "state": state_dies,
    "scheduler": scheduler_dies,
    "edge": edge_dies,
    "engine": engine_dies,
}


@pytest.mark.parametrize("part", PARTS)
async def test_a_killed_part_leaves_nothing_wrong(system: System, part: str) -> None:
    print(f"\nseed {SEED}")
    load = Load(system, f"{SEED}-{part}", LOOPS_SCHEDULER if part == "scheduler" else LOOPS)
    async with load.running():
        await load.progress(20)
        await PARTS[part](system)
        took_s = await back_after(system, load)
    print(f"{part}: granted, served and stored again {took_s:.1f} s after its return; {summary(load)}")

    every_request_ended_once(load)
    await system.rest()
    await maps_agree(system)
    await predictions_hold(system)
    await system.rest()


async def back_after(system: System, load: Load) -> float:
    """Seconds until requests are served and their events are in Postgres, of every tenant, on whole maps."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    waiting_for = ""
    generator = random.Random(f"{SEED}/back")

    async def stored(tenant: str) -> bool:
        return system.keys(tenant, prompt) <= (await system.stored_map())[answered.worker_id]

    try:
        async with asyncio.timeout(BACK_SECONDS_MAX):
            waiting_for = "every worker ready"
            await until(system.ready)
            for tenant in TENANTS:
                prompt = generator.choices(range(1, 30_000), k=BLOCK_SIZE * 4)
                waiting_for = f"a request of {tenant}"
                answered = await system.ask(tenant, prompt)
                waiting_for = f"events of {tenant} on {answered.worker_id} in Postgres"
                await until(partial(stored, tenant))
    except TimeoutError:
        status = await system.stack.status()
        raise AssertionError(
            f"after {BACK_SECONDS_MAX:.0f} s it still waits for {waiting_for}: {status}"
        ) from None
    await load.progress(10)
    return loop.time() - began


def every_request_ended_once(load: Load) -> None:
    assert len(load.outcomes) == load.started
    assert all(len(outcomes) == 1 for outcomes in load.outcomes.values())
    served = sum(not outcome.error for (outcome,) in load.outcomes.values())
    assert served >= 30, summary(load)


def summary(load: Load) -> str:
    errors: dict[str, int] = {}
    for outcomes in load.outcomes.values():
        for outcome in outcomes:
            errors[outcome.error or "served"] = errors.get(outcome.error or "served", 0) + 1
    return f"{load.started} requests: {errors}"


async def maps_agree(system: System) -> None:
    """Postgres and scheduler hold what the engines hold, to the block."""
    try:
        await until(system.agrees)
    except TimeoutError:
        truth = {engine.name: await engine.holds() for engine in system.engines}
        stored = await system.stored_map()
        page = await system.stack.status()
        differences = {
            name: f"{len(stored[name] - held)} too many, {len(held - stored[name])} missing of {len(held)}"
            for name, held in truth.items()
        }
        raise AssertionError(f"Postgres: {differences}; the scheduler holds {page['map_blocks']}") from None


async def predictions_hold(system: System) -> None:
    """What is predicted is what the engine then finds, on prompts that were seen and on fresh ones."""
    generator = random.Random(f"{SEED}/probe")
    for tenant in TENANTS:
        prompt = generator.choices(range(1, 30_000), k=BLOCK_SIZE * 3)
        for turn in range(PROBES):
            answered = await system.ask(tenant, prompt)
            assert answered.predicted_tokens == answered.cached_tokens, f"{tenant}, turn {turn}: {answered}"
            await maps_agree(system)
            prompt = prompt + answered.output + generator.choices(range(1, 30_000), k=BLOCK_SIZE)

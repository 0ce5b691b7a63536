"""A worker edge between a simulated engine's sockets and a log: what readers of the log end up knowing."""

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.integration.edge_bench import WORKER, Bench, MapReader, bench

from evenhand.core.fold import FoldOutcome
from evenhand.core.ids import Epoch, Seq
from evenhand.core.kv import (
    EpochFloor,
    KeysRefuted,
    SnapshotPart,
    SnapshotRequested,
    WorkerAnnounced,
    WorkerLeft,
    WorkerLoadReported,
)
from evenhand.worker.pages import metrics_page


async def settle(b: Bench, reader: MapReader, expected: set[int], what: str) -> None:
    await reader.until(lambda: reader.held() == expected and reader.complete(), what)


async def holds(reader: MapReader, expected: set[int], what: str) -> None:
    await reader.until(lambda: expected <= reader.held() and reader.complete(), what)


async def test_what_the_engine_stores_and_evicts_is_what_the_map_holds() -> None:
    async with bench(kv_blocks=33) as b, b.edge() as edge:
        reader = MapReader(b.log)
        first, second = b.prompt(8), b.prompt(5)
        assert await b.complete(first) == 0
        await settle(b, reader, b.keys(first), "the first prompt's blocks")
        assert await b.complete(first) == 8 * 16
        await b.complete(second, salt="tenant")
        await settle(b, reader, b.keys(first) | b.keys(second, "tenant"), "salted blocks beside unsalted")
        for _ in range(12):
            prompt = b.prompt(6)
            await b.complete(prompt)
            await holds(reader, b.keys(prompt), "the prompt's blocks")
        assert len(reader.held()) <= 32
        held_here = (await b.complete(first)) // 16
        assert held_here == len(b.keys(first) & reader.held())
        announced = next(m for m in reader.messages if isinstance(m, WorkerAnnounced))
        assert (announced.model, announced.block_size_tokens, announced.kv_blocks) == ("sim", 16, 32)
        assert announced.model_length_max_tokens == 512
        load = [m for m in reader.messages if isinstance(m, WorkerLoadReported)][-1]
        assert load.healthy
        assert load.prompt_tokens_total > 0
        assert edge.state is not None
        assert edge.state.continuity.counters.gaps == 0


async def test_an_engine_that_restarts_in_place_starts_with_an_empty_map_and_counts_at_once() -> None:
    async with bench() as b, b.edge():
        reader = MapReader(b.log)
        before, after = b.prompt(4), b.prompt(4)
        await b.complete(before)
        await settle(b, reader, b.keys(before), "blocks before the restart")
        epoch = reader.epoch()
        await b.fault(restart=True)
        await b.complete(after)
        await settle(b, reader, b.keys(after), "only blocks after the restart")
        assert reader.epoch() > epoch


async def test_an_idle_engine_that_restarts_is_emptied_without_any_event() -> None:
    async with bench() as b, b.edge():
        reader = MapReader(b.log)
        await b.complete(b.prompt(4))
        await reader.until(lambda: len(reader.held()) == 4, "four blocks")
        await b.fault(restart=True)
        await reader.until(
            lambda: not reader.held() and reader.complete(), "an empty map by the process start time"
        )


async def test_lost_frames_come_back_by_replay() -> None:
    async with bench() as b, b.edge() as edge:
        reader = MapReader(b.log)
        lost, seen = b.prompt(4), b.prompt(4)
        await b.complete(seen[:40])
        await settle(b, reader, b.keys(seen[:40]), "the first blocks")
        epoch = reader.epoch()
        await b.fault(drop_next=2)
        await b.complete(lost)
        await b.complete(b.prompt(2))
        await b.complete(seen)
        await reader.until(lambda: b.keys(lost) | b.keys(seen) <= reader.held(), "the lost blocks")
        assert reader.epoch() == epoch, "the same life"
        assert edge.state is not None
        assert edge.state.continuity.counters.gaps >= 1
        assert edge.state.continuity.counters.gaps_unrecovered == 0


async def test_without_replay_a_gap_begins_a_new_epoch() -> None:
    async with bench() as b, b.edge(b.edge_config(replays=False)) as edge:
        reader = MapReader(b.log)
        # Subscribing takes effect at the engine some time after the edge asks for it.
        probe = b.prompt(1)
        while edge.state is None or edge.state.continuity.last is None:
            await b.complete(probe := b.prompt(1))
            await asyncio.sleep(0.01)
        await reader.until(lambda: b.keys(probe) <= reader.held(), "the probe")
        epoch = reader.epoch()
        await b.fault(drop_next=1)
        await b.complete(b.prompt(3))
        after = b.prompt(3)
        await b.complete(after)
        await settle(b, reader, b.keys(after), "only what came after the gap")
        assert reader.epoch() > epoch


async def test_repeated_frames_change_nothing() -> None:
    async with bench() as b, b.edge() as edge:
        reader = MapReader(b.log)
        await b.fault(duplicate=True)
        first, second = b.prompt(3), b.prompt(3)
        await b.complete(first)
        await b.complete(second)
        await settle(b, reader, b.keys(first) | b.keys(second), "both prompts")
        assert edge.state is not None
        assert edge.state.continuity.counters.lives_begun == 0
        assert edge.state.translator.phantoms_max == 0


async def test_an_edge_that_restarts_goes_on_in_the_same_epoch_and_catches_up(tmp_path: Path) -> None:
    async with bench() as b:
        config = b.edge_config(tmp_path / "w0.checkpoint")
        reader = MapReader(b.log)
        before, between, after = b.prompt(4), b.prompt(4), b.prompt(4)
        async with b.edge(config):
            await b.complete(before)
            await settle(b, reader, b.keys(before), "blocks before")
        epoch = reader.epoch()
        await b.complete(between)
        async with b.edge(config) as edge:
            await settle(b, reader, b.keys(before) | b.keys(between), "what happened while the edge was away")
            await b.complete(after)
            await settle(b, reader, b.keys(before) | b.keys(between) | b.keys(after), "and what happens next")
            assert edge.state is not None
            assert edge.state.continuity.counters.lives_begun == 0
        assert reader.epoch() == epoch
        assert not reader.outcomes(FoldOutcome.STALE_EPOCH)


async def test_an_edge_that_restarts_behind_a_restarted_engine_begins_a_new_epoch(tmp_path: Path) -> None:
    async with bench() as b:
        config = b.edge_config(tmp_path / "w0.checkpoint")
        reader = MapReader(b.log)
        old, new = b.prompt(4), [b.prompt(2) for _ in range(3)]
        async with b.edge(config):
            await b.complete(old)
            await settle(b, reader, b.keys(old), "blocks of the old life")
        epoch = reader.epoch()
        await b.fault(restart=True)
        for prompt in new:
            await b.complete(prompt)
        async with b.edge(config):
            await settle(b, reader, set().union(*map(b.keys, new)), "blocks of the new life only")
        assert reader.epoch() > epoch


async def test_a_torn_checkpoint_is_none(tmp_path: Path) -> None:
    async with bench() as b:
        config = b.edge_config(tmp_path / "w0.checkpoint")
        reader = MapReader(b.log)
        prompt = b.prompt(4)
        async with b.edge(config):
            await b.complete(prompt)
            await settle(b, reader, b.keys(prompt), "blocks before")
        data = (tmp_path / "w0.checkpoint").read_bytes()
        (tmp_path / "w0.checkpoint").write_bytes(data[: len(data) // 2])
        epoch = reader.epoch()
        async with b.edge(config):
            await reader.until(
                lambda: reader.epoch() > epoch and reader.held() == b.keys(prompt), "all of it again by replay"
            )


async def test_a_broker_that_is_away_costs_nothing_but_time() -> None:
    async with bench() as b, b.edge() as edge:
        reader = MapReader(b.log)
        first, second = b.prompt(4), b.prompt(4)
        await b.complete(first)
        await settle(b, reader, b.keys(first), "blocks before")
        b.log.available = False
        await b.complete(second)
        await reader.until(lambda: not edge.publishing, "the edge notices")
        b.log.available = True
        await settle(b, reader, b.keys(first) | b.keys(second), "blocks from while the broker was away")
        assert not reader.outcomes(FoldOutcome.GAP)
        b.log.unacknowledged_next = 3
        third = b.prompt(4)
        await b.complete(third)
        await reader.until(
            lambda: b.keys(third) <= reader.held() and reader.complete(), "past lost acknowledgements"
        )


async def test_a_new_broker_is_told_everything_when_it_asks() -> None:
    async with bench() as b, b.edge():
        reader = MapReader(b.log)
        prompt = b.prompt(6)
        await b.complete(prompt)
        await settle(b, reader, b.keys(prompt), "blocks before")
        b.log.replace()
        fresh = MapReader(b.log)
        await fresh.until(lambda: fresh.count(WorkerAnnounced) > 0, "the next heartbeat")
        assert not fresh.held()
        for message in [m for result in fresh.results for m in result.control]:
            b.tell(message)
        await settle(b, fresh, b.keys(prompt), "a snapshot on request")


async def test_snapshots_are_made_at_most_once_an_interval() -> None:
    async with bench() as b, b.edge(replace(b.edge_config(), snapshot_interval_ms=60_000)) as edge:
        reader = MapReader(b.log)
        await b.complete(b.prompt(2))
        await reader.until(lambda: len(reader.held()) == 2, "two blocks")
        for _ in range(5):
            b.tell(SnapshotRequested(WORKER, "test"))
        assert edge.state is not None
        state = edge.state
        await reader.until(lambda: state.counters.snapshots_asked == 5, "five wishes heard")
        await b.complete(b.prompt(2))
        await reader.until(lambda: len(reader.held()) == 4, "batches go on")
        assert reader.count(SnapshotPart) == 1, "the one at the start"


async def test_a_floor_lifts_the_edge_into_a_later_epoch_with_the_same_map() -> None:
    async with bench() as b, b.edge() as edge:
        reader = MapReader(b.log)
        prompt = b.prompt(5)
        await b.complete(prompt)
        await settle(b, reader, b.keys(prompt), "blocks before")
        floor = Epoch(reader.epoch() + 1_000_000_000)
        b.tell(EpochFloor(WORKER, floor))
        b.tell(EpochFloor(WORKER, Epoch(1)))
        await reader.until(
            lambda: reader.epoch() > floor and reader.held() == b.keys(prompt) and reader.complete(),
            "the map anew",
        )
        assert reader.epoch() == floor + 1
        assert edge.state is not None
        assert edge.state.counters.floors_told == 1
        more = b.prompt(2)
        await b.complete(more)
        await settle(b, reader, b.keys(prompt) | b.keys(more), "batches go on")


async def test_refuted_keys_go_out_as_removed_and_a_later_store_stands() -> None:
    async with bench() as b, b.edge():
        reader = MapReader(b.log)
        prompt, later = b.prompt(4), b.prompt(2)
        await b.complete(prompt)
        await settle(b, reader, b.keys(prompt), "blocks before")
        seen = reader.cache_map.position(WORKER)
        assert seen is not None
        await b.complete(later)
        await settle(b, reader, b.keys(prompt) | b.keys(later), "later blocks")
        wrong = sorted(b.keys(prompt))[:2] + sorted(b.keys(later))
        b.tell(KeysRefuted(WORKER, seen.epoch, seen.seq, wrong))
        b.tell(KeysRefuted(WORKER, Epoch(seen.epoch - 1), Seq(10**9), sorted(b.keys(prompt))))
        expected = (b.keys(prompt) - set(wrong)) | b.keys(later)
        await settle(b, reader, expected, "the refuted keys gone, the later stores kept")


async def test_full_reports_leave_phantoms_that_never_exceed_the_engines_size() -> None:
    async with bench(kv_blocks=25) as b, b.edge():
        reader = MapReader(b.log)
        await b.fault(full_report=True)
        hot = b.prompt(6)
        for _ in range(5):
            await b.complete(hot)
        for _ in range(10):
            await b.complete(b.prompt(5))
        last = b.prompt(5)
        await b.complete(last)
        await reader.until(lambda: b.keys(last) <= reader.held(), "the last blocks")
        assert len(reader.held()) <= 24


async def test_traffic_without_events_is_an_alarm() -> None:
    async with bench() as b, b.edge(replace(b.edge_config(), silence_alarm_ms=100)) as edge:
        reader = MapReader(b.log)
        await b.fault(silent=True)
        assert edge.state is not None
        state = edge.state
        assert 'evenhand_edge_silent_with_traffic{worker_id="w0"} 0\n' in metrics_page(edge)
        for _ in range(4):
            await b.complete(b.prompt(40))
        await reader.until(lambda: state.alarmed, "the alarm")
        assert state.counters.silence_alarms == 1
        assert 'evenhand_edge_silent_with_traffic{worker_id="w0"} 1\n' in metrics_page(edge)


async def test_an_engine_without_events_is_announced_as_such() -> None:
    async with bench() as b:
        config = replace(b.edge_config(), kv_events="", replay="", sends_events=False)
        async with b.edge(config):
            reader = MapReader(b.log)
            await reader.until(lambda: reader.count(WorkerLoadReported) > 2, "load")
            assert all(not m.sends_events for m in reader.messages if isinstance(m, WorkerAnnounced))
            epoch = reader.epoch()
            await b.fault(restart=True)
            await reader.until(lambda: reader.epoch() > epoch, "a new epoch for the new process")


async def test_an_unhealthy_engine_is_told_and_the_edge_lives_on() -> None:
    async with bench() as b, b.edge():
        reader = MapReader(b.log)

        def loads() -> list[WorkerLoadReported]:
            return [m for m in reader.messages if isinstance(m, WorkerLoadReported)]

        await reader.until(lambda: bool(loads()) and loads()[-1].healthy, "healthy")
        await b.fault(unhealthy=True)
        await reader.until(lambda: not loads()[-1].healthy, "unhealthy")
        await b.fault(unhealthy=False)
        await reader.until(lambda: loads()[-1].healthy, "healthy again")


async def test_leaving_is_said_only_when_it_is_meant(tmp_path: Path) -> None:
    async with bench() as b:
        config = b.edge_config(tmp_path / "w0.checkpoint")
        reader = MapReader(b.log)
        prompt = b.prompt(3)
        async with b.edge(config):
            await b.complete(prompt)
            await settle(b, reader, b.keys(prompt), "blocks")
        reader.catch_up()
        assert reader.count(WorkerLeft) == 0
        assert config.checkpoint is not None
        assert config.checkpoint.exists()
        async with b.edge(config, leave=True):
            await reader.until(reader.complete, "back")
        reader.catch_up()
        assert reader.count(WorkerLeft) == 1
        assert not reader.held()
        assert not config.checkpoint.exists()
        async with b.edge(config):
            await reader.until(lambda: reader.held() == b.keys(prompt), "a later epoch returns")

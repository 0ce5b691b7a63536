"""What an edge would publish: first copies and last losses, numbered; equal to the engine's own account."""

from evenhand.core.cache_map import CacheMap
from evenhand.core.fold import fold
from evenhand.core.ids import WorkerId
from evenhand.core.kv import Removed, Stored
from evenhand.engine.events import GPU, AllBlocksCleared, BlockRemoved, BlockStored
from evenhand.policies.table import make_policy
from evenhand.simulation.trials.map_feed import MapFeed
from evenhand.simulation.trials.settings import MapFaults, TrialSettings
from evenhand.simulation.trials.trial import Trial
from evenhand.simulation.trials.workloads import HotTenant, hot_tenant


def stored(*names: int) -> BlockStored:
    return BlockStored(names, None, (), 16, None, GPU, None)


def test_only_first_copies_and_last_losses_go_out() -> None:
    feed = MapFeed(WorkerId("w"), 1)
    first = feed.batch([stored(1, 2)])
    assert first is not None
    assert first.operations == (Stored((1, 2)),)
    second = feed.batch([stored(2, 3), BlockRemoved((2,), GPU)])
    assert second is not None
    assert (second.seq, second.operations) == (2, (Stored((3,)),)), "the second copy of 2 came and went"
    third = feed.batch([BlockRemoved((2, 1), GPU)])
    assert third is not None
    assert third.operations == (Removed((2, 1)),)
    assert feed.batch([]) is None
    assert feed.snapshot().keys == (3,)
    feed.batch([AllBlocksCleared()])
    assert feed.snapshot().keys == ()


def folded(faults: MapFaults) -> None:
    """After a run the policy's map is what the engines hold."""
    policy = make_policy("longest-prefix")
    workload = hot_tenant(HotTenant(duration_s=3.0, kv_blocks=300, output_tokens=60), 5)
    trial = Trial(policy, workload, TrialSettings(map_faults=faults))
    trial.run()
    for _at, _number, message in sorted(trial.messages):
        policy.map_changed(message, trial.last_end_ns)
    known: CacheMap = policy.known.map  # type: ignore[attr-defined]
    for worker in trial.workers:
        assert worker.engine is not None
        assert worker.feed is not None
        if faults.lost:
            fold(known, worker.feed.snapshot())
        held = known.worker(worker.worker_id)
        assert held is not None
        assert held.held[0] == set(worker.engine.pool.findable())


def test_the_map_is_exact_without_faults() -> None:
    folded(MapFaults())


def test_the_map_is_exact_once_lagging_and_doubled_messages_have_come() -> None:
    folded(MapFaults(lag_ns=300_000_000, doubled=0.3))


def test_a_snapshot_heals_what_was_lost() -> None:
    folded(MapFaults(lost=0.3))

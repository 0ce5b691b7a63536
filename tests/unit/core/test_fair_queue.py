"""The clocks alone: the three-step refresh by sets, written out plainly, against ``FairQueue``."""

import random

import pytest

from evenhand.core.facts import WorkerSpec
from evenhand.core.fair_queue import FairChild, FairQueue
from evenhand.core.ids import Epoch, PoolId, WorkerId
from evenhand.core.members import Members
from evenhand.core.worker import Worker


class Clocks(FairQueue[FairChild]):
    """A node by itself, with its workers."""

    def __init__(self) -> None:
        super().__init__(Members())

    def join(self, worker: Worker) -> None:
        self._members.add(worker)
        self.member_joined(worker)

    def leave(self, worker: Worker) -> None:
        self._members.remove(worker)
        self.member_left(worker.spec.worker_id)


def child(name: str, weight: float = 1.0) -> FairChild:
    return FairChild(name, weight)


def worker(name: str, tokens: int = 1_000) -> Worker:
    spec = WorkerSpec(WorkerId(name), PoolId("pool"), "http://w", Epoch(1), 8, tokens, 1)
    return Worker(spec, 0, 8_000.0, 20.0)


class PlainClocks:
    """DESIGN's refresh, step by step, with A_w and F_i as sets."""

    def __init__(self) -> None:
        self.v: dict[str, float] = {}
        self.reach: dict[str, frozenset[str]] = {}
        self.worker_v: dict[str, float] = {}

    def change(self, v: dict[str, float], reach: dict[str, frozenset[str]], workers: list[str]) -> None:
        before = self.reach
        for name in workers:
            self.worker_v.setdefault(name, 0.0)
        self.v.update(v)
        self.reach = reach
        for name in workers:
            stayed = [t for t in reach if name in reach[t] and name in before.get(t, frozenset())]
            if stayed:
                self.worker_v[name] = max(self.worker_v[name], min(self.v[t] for t in stayed))
        for t in reach:
            for name in reach[t] - before.get(t, frozenset()):
                self.v[t] = max(self.v[t], self.worker_v[name])
        for name in workers:
            inside = [self.v[t] for t in reach if name in reach[t]]
            if inside:
                self.worker_v[name] = max(self.worker_v[name], min(inside))


@pytest.mark.parametrize("sizes", [(1_000,), (1_000, 1_000), (100, 1_000), (100, 500, 500, 1_000)])
@pytest.mark.parametrize("seed", range(15))
def test_clocks_are_those_of_the_plain_rule(seed: int, sizes: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    fair, plain = Clocks(), PlainClocks()
    tenants = {name: child(name) for name in ("a", "b", "c", "d")}
    reaches: dict[str, int | None] = dict.fromkeys(tenants)
    workers: dict[str, Worker] = {}
    away: dict[str, Worker] = {}
    plain.v = dict.fromkeys(tenants, 0.0)

    def sets() -> dict[str, frozenset[str]]:
        return {
            name: frozenset(w for w, each in workers.items() if each.capacity_tokens >= reach)
            for name, reach in reaches.items()
            if reach is not None
        }

    for step in range(300):
        roll = rng.random()
        changed: dict[str, float] = {}
        if roll < 0.08 and len(workers) < len(sizes):
            name = rng.choice([f"w{i}" for i in range(len(sizes)) if f"w{i}" not in workers])
            workers[name] = away.pop(name) if name in away else worker(name, sizes[int(name[1:])])
            fair.join(workers[name])
        elif roll < 0.12 and workers:
            name = rng.choice(list(workers))
            away[name] = workers.pop(name)
            fair.leave(away[name])
        else:
            name = rng.choice(list(tenants))
            v = tenants[name].v
            if roll < 0.6:
                v += rng.choice([1.0, 10.0, 50.0])
            elif roll < 0.8:
                v = max(0.0, v - rng.choice([1.0, 20.0]))
            if roll > 0.5:
                reaches[name] = rng.choice([None, 10, 10, 300, 800])
            changed[name] = v
            fair.place(tenants[name], v, reaches[name])
        plain.change(changed, sets(), list(workers))
        for name, each in tenants.items():
            assert each.v == plain.v[name], f"step {step}: v of {name}"
        for name, each_worker in workers.items():
            assert fair.virtual_time(each_worker.spec.worker_id) == plain.worker_v[name], (
                f"step {step}: V of {name}"
            )
            inside = [plain.v[t] for t, reach in plain.reach.items() if name in reach]
            assert fair.lo(each_worker) == min(inside, default=None)
        assert [t for _, t, _ in fair.in_order()] == [
            t for _, t in sorted((each.v, name) for name, each in tenants.items() if reaches[name] is not None)
        ]


def test_who_comes_back_starts_level_and_has_saved_nothing() -> None:
    fair, one, late = Clocks(), child("one"), child("late")
    fair.join(worker("w"))
    fair.place(one, 0.0, 1)
    for v in (100.0, 200.0, 300.0):
        fair.place(one, v, 1)
    fair.place(late, late.v, 1)
    assert late.v == 300.0


def test_who_was_ahead_when_it_went_idle_is_not_pulled_back_nor_punished_further() -> None:
    fair, one, greedy = Clocks(), child("one"), child("greedy")
    fair.join(worker("w"))
    fair.place(one, 0.0, 1)
    fair.place(greedy, 500.0, 1)
    fair.place(greedy, 500.0, None)
    fair.place(one, 400.0, 1)
    fair.place(greedy, greedy.v, 1)
    assert greedy.v == 500.0


def test_a_refund_does_not_lower_a_workers_virtual_time() -> None:
    fair, one, late = Clocks(), child("one"), child("late")
    only = worker("w")
    fair.join(only)
    fair.place(one, 0.0, 1)
    fair.place(one, 300.0, 1)
    fair.place(one, 100.0, 1)
    assert fair.virtual_time(only.spec.worker_id) == 300.0
    fair.place(late, late.v, 1)
    assert late.v == 300.0


def test_a_fresh_worker_lifts_nobody() -> None:
    fair, one = Clocks(), child("one")
    fair.join(worker("w1"))
    fair.place(one, 300.0, 1)
    fair.place(one, 100.0, 1)
    fair.join(worker("w2"))
    assert one.v == 100.0


def test_weights_are_summed_over_a_alone() -> None:
    fair, one, other = Clocks(), child("one", 2.0), child("other", 3.0)
    fair.join(worker("w"))
    fair.place(one, 0.0, 1)
    fair.place(other, 0.0, 1)
    assert fair.weight_sum == 5.0
    fair.place(one, 0.0, None)
    assert fair.weight_sum == 3.0


def test_those_that_are_passed_stay_in_order_whatever_their_names() -> None:
    clocks = Clocks()
    place = worker("w", 100)
    clocks.join(place)
    placed = {name: child(name) for name in ("a", "b", "c", "ahead")}
    for name, v in (("c", 1.0), ("b", 2.0), ("a", 3.0), ("ahead", 9.0)):
        clocks.place(placed[name], v, 1)
    for v_least in (5.0, 1e9):
        clocks.lift_behind(place, v_least)
        order = [each.node_id for _, _, each in clocks.in_order()]
        assert [name for name in order if name != "ahead"] == ["c", "b", "a"]
        assert clocks.lo(place) == clocks.virtual_time(place.spec.worker_id) == v_least
        assert placed["a"].v == pytest.approx(v_least)

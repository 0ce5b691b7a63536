"""A few workers and arrivals, written short."""

from evenhand.core.ids import Epoch, Seq, WorkerId
from evenhand.core.kv import KvBatch, Stored
from evenhand.policies.policy import Arrival, FleetWorker, Policy

BLOCK = 16


def worker_id(number: int) -> WorkerId:
    return WorkerId(f"w{number}")


def join(policy: Policy, count: int, slots: int = 64, kv_blocks: int = 10_000, block_size: int = BLOCK) -> None:
    """``count`` workers, all alike."""
    for number in range(count):
        policy.worker_joined(FleetWorker(worker_id(number), slots, kv_blocks, block_size), 0)


def arrival(
    number: int,
    tenant: str = "a",
    blocks: tuple[int, ...] = (),
    prompt: int = 0,
    output: int = 10,
    *,
    output_max: int = 0,
    weight: float = 1.0,
    session: str = "",
    well_behaved: bool = True,
) -> Arrival:
    """A prompt of these blocks, or of so many tokens."""
    tokens = prompt or max(1, len(blocks) * BLOCK)
    return Arrival(
        number,
        0,
        tenant,
        blocks,
        tokens,
        output_max or output,
        output,
        weight=weight,
        session=session,
        well_behaved=well_behaved,
    )


def holds(policy: Policy, number: int, blocks: tuple[int, ...], seq: int = 1) -> None:
    """A worker's first event: it stored these blocks."""
    policy.map_changed(KvBatch(worker_id(number), Epoch(1), Seq(seq), (Stored(blocks),)), 0)


def send(policy: Policy, one: Arrival, now_ns: int = 0) -> WorkerId:
    """Submit; where it goes at once."""
    policy.submit(one, now_ns)
    (placed,) = policy.place(now_ns)
    assert placed.arrival is one
    return placed.worker_id

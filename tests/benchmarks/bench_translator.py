"""Translator throughput: raw msgpack in, block keys out, one core.

Input: frames of block size 16 as a current vLLM writes them, each with as many stores of as many blocks as a
frame drawn from the recordings; half of the prompts are salted. The engine's block pool is imitated by a queue:
each store beyond its size evicts as many blocks, one block an event. A block counts when its key comes out: once
as stored and once as removed. Blocks stored alone are shown beside it.

Time is this process's own processor time, the best of some rounds: other work on the machine is left out as far as
that can be.

    python tests/benchmarks/bench_translator.py [--blocks 400000] [--arrays]
"""

import argparse
import json
import random
import sys
import time
from collections import deque
from pathlib import Path

import msgspec

from evenhand.core.ids import Seq
from evenhand.worker.translator import Translator, TranslatorConfig

CAPTURES = Path(__file__).parent.parent / "golden" / "captures"
BLOCK_SIZE = 16
KV_BLOCKS = 20_000
FLOOR_BLOCKS_PER_S = 250_000


def recorded_mixture() -> list[list[tuple[bool, int]]]:
    """Per recorded frame that stores anything: of each store, whether it begins at the root, and its blocks."""
    mixture = []
    for name in ("e0.live.jsonl", "e0.dup_abort.jsonl", "dp2.0.jsonl"):
        for line in (CAPTURES / name).read_text().splitlines():
            events = json.loads(line)["decoded"][1]
            stores = [event for event in events if event["type"] == "BlockStored"]
            mixture.append([(store["parent_block_hash"] is None, len(store["block_hashes"])) for store in stores])
    return [frame for frame in mixture if frame]


def recorded_like_frames(blocks: int, arrays: bool, seed: int) -> tuple[list[bytes], int]:
    """Frames with at least ``blocks`` stored blocks in them, and how many blocks those are."""
    rng = random.Random(seed)
    mixture = recorded_mixture()
    pool: deque[int] = deque()
    frames: list[bytes] = []
    growing: list[int] = []
    stored = 0
    while stored < blocks:
        events: list[object] = []
        for at_root, count in rng.choice(mixture):
            parent = None if at_root or not growing else rng.choice(growing)
            names = [rng.getrandbits(64) for _ in range(count)]
            evicted = [pool.popleft() for _ in range(max(0, len(pool) + count - KV_BLOCKS))]
            events += [removed(name, arrays) for name in evicted]
            events.append(stored_event(rng, names, parent, arrays))
            pool.extend(names)
            growing = [*growing[-31:], names[-1]]
            stored += count
        frames.append(msgspec.msgpack.encode([1795956944.6, events, 0]))
    return frames, stored


def removed(name: int, arrays: bool) -> object:
    if arrays:
        return ["BlockRemoved", [name], "GPU", 0]
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}


def stored_event(rng: random.Random, names: list[int], parent: int | None, arrays: bool) -> object:
    tokens = [rng.randrange(128_000) for _ in range(len(names) * BLOCK_SIZE)]
    salt: list[object] = [None] * len(names)
    if parent is None and rng.random() < 0.5:
        salt[0] = ["tenant-a"]
    if arrays:
        return ["BlockStored", names, parent, tokens, BLOCK_SIZE, None, "GPU", None, salt, 0, "full_attention"]
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": salt,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=400_000)
    parser.add_argument("--arrays", action="store_true", help="positional events, as older engines send")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    frames, blocks = recorded_like_frames(options.blocks, options.arrays, options.seed)
    best = 0.0
    for _ in range(options.rounds):
        translator = Translator(TranslatorConfig("m", BLOCK_SIZE, KV_BLOCKS))
        began = time.process_time()
        for number, payload in enumerate(frames):
            translator.translate(payload, number, Seq(number))
        elapsed = time.process_time() - began
        assert translator.counters.blocks_stored == blocks
        assert translator.counters.stores_waiting == translator.counters.events_malformed == 0
        removed_blocks = translator.counters.blocks_removed
        best = max(best, (blocks + removed_blocks) / elapsed)
    print(
        f"{'frames':>9} {'stored':>9} {'removed':>9} {'MB':>7} {'blocks/s':>11} {'stored/s':>11} {'at least':>9}"
    )
    print(
        f"{len(frames):>9} {blocks:>9} {removed_blocks:>9} {sum(map(len, frames)) / 1e6:>7.1f} {best:>11,.0f}"
        f" {best * blocks / (blocks + removed_blocks):>11,.0f} {FLOOR_BLOCKS_PER_S:>9,}"
    )
    return 0 if best >= FLOOR_BLOCKS_PER_S else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

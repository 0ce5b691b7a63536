"""Runs in the rival's own environment: the same events and look-ups on ``dynamo.llm.RadixTree``.

``python rival_radix_tree.py EVENTS QUERIES`` prints one JSON object: seconds and CPU seconds of all events
and of all look-ups, and the answers of one round of look-ups as ``[[worker, blocks], …]``.

EVENTS holds, for each event, worker number and length as two little-endian uint32, then the JSON. QUERIES is JSON:
``{"rounds": n, "keys": [[…], …]}``.
"""

import gc
import json
import struct
import sys
import time
from pathlib import Path

from dynamo.llm import RadixTree  # type: ignore[import-not-found]


def main(events_path: str, queries_path: str) -> None:
    data, at = Path(events_path).read_bytes(), 0
    events: list[tuple[int, bytes]] = []
    while at < len(data):
        worker, length = struct.unpack_from("<II", data, at)
        events.append((worker, data[at + 8 : at + 8 + length]))
        at += 8 + length
    queries = json.loads(Path(queries_path).read_text())
    tree = RadixTree()
    gc.freeze()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    for worker, event in events:
        tree.apply_event(worker, event)
    tree.find_matches([1])  # whatever is still on its way is applied before this answers
    folded, folded_cpu = time.perf_counter(), time.process_time()
    for _ in range(queries["rounds"]):
        for keys in queries["keys"]:
            tree.find_matches(keys)
    looked_up, looked_up_cpu = time.perf_counter(), time.process_time()
    answers = [
        sorted([worker, blocks] for (worker, _), blocks in tree.find_matches(keys).scores.items())
        for keys in queries["keys"]
    ]
    figures = {
        "fold_s": folded - begun,
        "match_s": looked_up - folded,
        "fold_cpu_s": folded_cpu - begun_cpu,
        "match_cpu_s": looked_up_cpu - folded_cpu,
        "answers": answers,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

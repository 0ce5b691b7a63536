"""``/health``, ``/ready`` and ``/metrics`` of an edge.

``/health`` answers while the event loop turns. ``/ready`` answers 200 once the broker has the announcement and
takes messages, and 503 with the reason before that. ``/metrics`` is Prometheus' text format: every total of the
edge as ``evenhand_edge_NAME_total``, labelled with the worker alone.
"""

from evenhand.core.kv import Tier
from evenhand.pages import Pages, usual_pages
from evenhand.worker.edge import WorkerEdge


def edge_pages(edge: WorkerEdge, port: int) -> Pages:
    """An edge's pages on loopback, not started yet."""
    return Pages(usual_pages(lambda: metrics_page(edge).encode(), lambda: not_ready(edge)), port)


def not_ready(edge: WorkerEdge) -> str:
    """Why the edge is not ready; empty: it is."""
    if not edge.announced.is_set():
        return "The worker is not announced yet."
    if not edge.publishing:
        return "The broker does not take messages."
    return ""


def metrics_page(edge: WorkerEdge) -> str:
    """All totals and gauges of one edge."""
    state = edge.state
    if state is None:
        return ""
    worker = edge.config.worker_id.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'{{worker_id="{worker}"}}'
    lines = [f"evenhand_edge_{name}_total{label} {value}" for name, value in state.all_counters().items()]
    gauges = {
        "epoch": state.outbox.epoch,
        "batch_number": state.outbox.seq,
        "keys_held_device": len(state.translator.held(Tier.DEVICE)),
        "phantoms_at_most": state.translator.phantoms_max,
        "stores_waiting_now": state.translator.stores_waiting,
        "settled": int(state.continuity.settled),
        "silent_with_traffic": int(state.alarmed),
    }
    lines += [f"evenhand_edge_{name}{label} {value}" for name, value in gauges.items()]
    return "\n".join(lines) + "\n"

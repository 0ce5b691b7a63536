"""Tables that a person can read: the live view of a run, and the summary that compares policies."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenhand.local.accounting import Ledger, percentile


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker's row: what its engine says."""

    worker_id: str
    running: int
    waiting: int
    blocks_held: int
    kv_blocks: int


def _seconds(wait_ms: float) -> str:
    if math.isnan(wait_ms):
        return "–"
    return f"{wait_ms / 1_000:.2f} s" if wait_ms < 10_000 else f"{wait_ms / 1_000:.0f} s"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def _table(title: str, names: int, *headings: str) -> Table:
    """A table whose first ``names`` columns are words and the rest figures; narrow enough for 80 columns."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < names else "right", no_wrap=True)
    return table


def tenants_table(title: str, ledger: Ledger, waits_ms: Mapping[str, Sequence[float]]) -> Table:
    """Per tenant: share due and got, queue, time to first token, cached share."""
    headings = ("due", "got", "got/due", "queue", "run", "done", "p50", "p99", "cached")
    table = _table(f"{title}   (p50, p99: time to first token)", 1, "tenant", *headings)
    total, due = ledger.got_total(), ledger.due()
    for tenant, account in ledger.accounts.items():
        table.add_row(
            tenant,
            _percent(due[tenant], total),
            _percent(account.got_cost, total),
            _percent(account.got_cost, due[tenant]),
            str(account.waiting),
            str(account.running),
            str(account.finished),
            _seconds(percentile(waits_ms[tenant], 0.5)),
            _seconds(percentile(waits_ms[tenant], 0.99)),
            _percent(account.cached_tokens, account.prompt_tokens),
        )
    return table


def workers_table(workers: Sequence[WorkerView]) -> Table:
    """Per worker: running, waiting, blocks held."""
    table = _table("", 1, "worker", "running", "waiting in engine", "blocks held", "of")
    for worker in workers:
        cells = (worker.running, worker.waiting, worker.blocks_held, worker.kv_blocks)
        table.add_row(worker.worker_id, *map(str, cells))
    return table


def live_view(
    title: str, ledger: Ledger, waits_ms: Mapping[str, Sequence[float]], workers: Sequence[WorkerView], note: str
) -> RenderableType:
    """Everything at a glance; redrawn several times a second."""
    return Group(tenants_table(title, ledger, waits_ms), workers_table(workers), Text(note, style="dim"))


def summary_table(ledgers: Sequence[tuple[str, Ledger]], duration_s: float) -> Table:
    """The same load under each policy, tenant by tenant."""
    headings = ("got/due", "done", "p50", "p99", "cached", "req/s")
    table = _table(
        "the same load under each policy   (p50, p99: time to first token)", 2, "policy", "tenant", *headings
    )
    for policy, ledger in ledgers:
        due = ledger.due()
        for number, (tenant, account) in enumerate(ledger.accounts.items()):
            table.add_row(
                policy if number == 0 else "",
                tenant,
                _percent(account.got_cost, due[tenant]),
                f"{account.finished} of {account.arrived}",
                _seconds(percentile(account.first_token_ms, 0.5)),
                _seconds(percentile(account.first_token_ms, 0.99)),
                _percent(account.cached_tokens, account.prompt_tokens),
                f"{account.finished / duration_s:.1f}",
                end_section=number == len(ledger.accounts) - 1,
            )
    return table

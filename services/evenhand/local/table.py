"""Tables that a person can read: the live view of a run, and the summary that compares policies."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def _ms(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:,.0f} ms" if value < 10_000 else f"{value / 1_000:,.1f} s"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def tenants_table(title: str, ledger: Ledger, waits_ms: Mapping[str, Sequence[float]]) -> Table:
    """Per tenant: share due and got, queue, time to first token, cached share."""
    table = Table(title=title, title_justify="left", expand=False)
    for heading in (
        "tenant",
        "weight",
        "due",
        "got",
        "got/due",
        "waiting",
        "running",
        "done",
        "TTFT p50",
        "TTFT p99",
        "cached",
    ):
        table.add_column(heading, justify="left" if heading == "tenant" else "right", no_wrap=True)
    total, due = ledger.got_total(), ledger.due()
    for tenant, account in ledger.accounts.items():
        table.add_row(
            tenant,
            f"{account.weight:g}",
            _percent(due[tenant], total),
            _percent(account.got_cost, total),
            _percent(account.got_cost, due[tenant]),
            str(account.waiting),
            str(account.running),
            str(account.finished),
            _ms(percentile(waits_ms[tenant], 0.5)),
            _ms(percentile(waits_ms[tenant], 0.99)),
            _percent(account.cached_tokens, account.prompt_tokens),
        )
    return table


def workers_table(workers: Sequence[WorkerView]) -> Table:
    """Per worker: running, waiting, blocks held."""
    table = Table(title="workers", title_justify="left", expand=False)
    for heading in ("worker", "running", "waiting in engine", "blocks held", "of"):
        table.add_column(heading, justify="left" if heading == "worker" else "right", no_wrap=True)
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
    table = Table(title="the same load under each policy", title_justify="left", expand=False)
    for heading in ("policy", "tenant", "got/due", "done", "of", "TTFT p50", "TTFT p99", "cached", "requests/s"):
        table.add_column(heading, justify="left" if heading in ("policy", "tenant") else "right", no_wrap=True)
    for policy, ledger in ledgers:
        due = ledger.due()
        finished = sum(account.finished for account in ledger.accounts.values())
        for number, (tenant, account) in enumerate(ledger.accounts.items()):
            table.add_row(
                policy if number == 0 else "",
                tenant,
                _percent(account.got_cost, due[tenant]),
                str(account.finished),
                str(account.arrived),
                _ms(percentile(account.first_token_ms, 0.5)),
                _ms(percentile(account.first_token_ms, 0.99)),
                _percent(account.cached_tokens, account.prompt_tokens),
                f"{finished / duration_s:.1f}" if number == 0 else "",
                end_section=number == len(ledger.accounts) - 1,
            )
    return table

"""The demo's chart: what each tenant was due and got, and how long it waited, policy by policy."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from evenhand.local.accounting import Ledger, percentile

matplotlib.use("Agg")

from matplotlib import pyplot, ticker

COLOURS = ("#3b6fb6", "#e08a3c", "#5a9e6f", "#9467bd", "#8c564b", "#7f7f7f")


def save_chart(ledgers: Sequence[tuple[str, Ledger]], path: Path) -> None:
    """Write a PNG with two panels: share got of share due, and time to first token (p50, p99; log scale)."""
    tenants = list(ledgers[0][1].accounts)
    width = 0.8 / len(ledgers)
    figure, (shares, waits) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for number, (policy, ledger) in enumerate(ledgers):
        due = ledger.due()
        places = [place + (number - (len(ledgers) - 1) / 2) * width for place in range(len(tenants))]
        colour = COLOURS[number % len(COLOURS)]
        got = [100 * ledger.accounts[t].got_cost / due[t] if due[t] else 0.0 for t in tenants]
        shares.bar(places, got, width * 0.92, label=policy, color=colour)
        p50 = [percentile(ledger.accounts[t].first_token_ms, 0.5) / 1_000 for t in tenants]
        p99 = [percentile(ledger.accounts[t].first_token_ms, 0.99) / 1_000 for t in tenants]
        waits.bar(places, p99, width * 0.92, color=colour, alpha=0.45)
        waits.bar(places, p50, width * 0.92, color=colour)
    shares.axhline(100, color="black", linewidth=0.8, linestyle="--")
    shares.set_title("Service got, as % of the share due")
    shares.set_ylabel("%")
    waits.set_title("Time to first token: p50 (solid), p99 (pale)")
    waits.set_ylabel("seconds, log scale")
    waits.set_yscale("log")
    waits.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    waits.yaxis.set_major_formatter(ticker.FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    waits.yaxis.set_minor_locator(ticker.NullLocator())
    for axes in (shares, waits):
        axes.set_xticks(range(len(tenants)), tenants)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *shares.get_legend_handles_labels(), loc="outside lower center", ncols=len(ledgers), frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

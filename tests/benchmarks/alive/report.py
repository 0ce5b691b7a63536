"""The page of results, as Markdown, and the line that is printed as each row is done."""

import datetime
import os
import platform
import textwrap
from collections.abc import Sequence

from tests.benchmarks.alive.figures import figures
from tests.benchmarks.alive.measure import Row, RunConfig
from tests.benchmarks.alive.plan import CHATS, COLD, FLEET, HOT, TENANTS, share_rates
from tests.benchmarks.alive.routes import KINDS

WIDTH = 115
COLUMNS = (
    "route", "req/s", "tokens/s", "hit", "well-behaved P50, P99 ms", "unserved", "work k", "hot P50, P99 ms",
    "unserved", "work k", "refused", "CPU % client, engines, router (busiest)", "late P99 ms",
)  # fmt: skip


def line(row: Row) -> str:
    """One row as it is measured."""
    head = f"{row.factor:4g} × {row.route:<16}"
    if row.skipped:
        return f"{head} {row.skipped}"
    good, hot, cpu = row.well_behaved, row.tenants[HOT], row.cpu
    parts = (
        f"{head} {row.requests_per_s:5.1f} req/s {row.tokens_per_s:6.0f} tok/s hit {row.hit_rate:4.0%}",
        f"well-behaved p50 {good.p50_ms:6.0f} p99 {good.p99_ms:6.0f} ms, {good.unserved}/{good.arrived} unserved, "
        f"work {good.work / 1e3:.0f}k",
        f"hot p50 {hot.p50_ms:6.0f} ms, {hot.unserved}/{hot.arrived} unserved, work {hot.work / 1e3:.0f}k",
        f"cpu client {cpu.client:.0f} engines {cpu.engines:.0f} router {cpu.router:.0f} (max "
        f"{cpu.busiest_router:.0f}) machine {cpu.machine:.0f} others {cpu.others:.0f}",
        f"late {row.lag_p99_ms:.1f} ms",
        f"{dict(row.failures) or ''} {row.distrust()}",
    )
    return " | ".join(parts)


def page(rows: Sequence[Row], config: RunConfig, took_s: float) -> str:
    """The whole page."""
    parts = [*_preamble(config, took_s), _figures_table(rows)]
    for factor in dict.fromkeys(row.factor for row in rows):
        own = [row for row in rows if row.factor == factor]
        parts += [f"## Hot tenant at {factor:g} times its share", _main_table(own), _tenant_table(own)]
    parts.append(_distrust(rows))
    return "\n\n".join(parts) + "\n"


def _preamble(config: RunConfig, took_s: float) -> list[str]:
    load, rates = config.load, share_rates(FLEET, config.load)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    paragraphs = (
        f"""Written by `python -m tests.benchmarks.alive`: the same arrivals through every route, one after the
        other, a fresh fleet and a fresh router each time. {datetime.datetime.now(datetime.UTC):%Y-%m-%d},
        {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, seed {config.seed},
        {took_s / 60:.0f} minutes in all.""",
        f"""Six equal tenants on {FLEET.engines} simulated engines: one hot with a shared prefix of
        {load.shared_tokens:,} tokens, four in conversations, one cold; Poisson arrivals, open loop,
        streamed completions. Each engine: {FLEET.slots} slots, {FLEET.kv_blocks:,} blocks of
        {FLEET.block_size} tokens, a step of {FLEET.step_base_ms:g} ms + {FLEET.prefill_token_us:g} µs for
        each prompt token + {FLEET.running_sequence_us:g} µs for each sequence. A tenant's share is a sixth
        of {load.busy:.0%} of what the fleet can do with every prefix cached: {rates[HOT]:.2f} requests/s of
        the hot tenant, {rates[CHATS[0]]:.2f} of each conversational one, {rates[COLD]:.2f} of the cold one;
        the well-behaved ask for {load.modesty:.0%} of theirs. Each row is a window of {config.seconds:g} s,
        whose first {config.warm_up_s:g} s only warm the caches (they count in throughput alone) and whose
        last {config.quiet_s:g} s bring nothing new, and a drain of at most {config.drain_s_max:g} s.""",
        """Times to the first token count from the scheduled arrival; what is never answered counts with its
        wait to the end of the run. *Unserved*: not wholly answered at the end of the window. *Work*: prompt
        + 2 · output tokens delivered in the window, cached or not, so that nobody gains by computing a
        prefix twice. *Cost*: what the engines did for it, a cached token at a tenth; *share*: part of all
        cost served in the window. Throughput counts the drain.""",
        f"""The wheels run with their published defaults, but for addresses and logging. `kv_aware` gets the
        engines' KV events and replay endpoints (`--kv-event-source`, `--kv-event-replay-source`). kvwarden
        serves one engine a model name and chooses none, so the client takes the names in turn; its
        `max_concurrent` is the fleet's {FLEET.engines * FLEET.slots} slots, and the tenant travels in
        `X-Tenant-ID`. The routers that match or count text get the prompt as text, which the engines
        tokenize; the others get token ids. Evenhand keeps its defaults.""",
    )
    kinds = "\n".join(
        f"| `{kind.name}` | {kind.says} | {' '.join(kind.wheel) if kind.wheel else '–'} |" for kind in KINDS
    )
    wrapped = [
        textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)
        for text in paragraphs
    ]
    return ["# Alive, beside real routers", *wrapped, f"| route | what | wheel |\n|---|---|---|\n{kinds}"]


def _figures_table(rows: Sequence[Row]) -> str:
    words = {True: "yes", False: "**no**", None: "–"}
    lines = [f"| {figure.wanted} | {figure.got} | {words[figure.held]} |" for figure in figures(rows)]
    return "\n".join(["## Figures wanted", "", "| what | got | held |", "|---|---|---|", *lines])


def _main_table(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "--:|" * (len(COLUMNS) - 1)]
    for row in rows:
        if row.skipped:
            lines.append(f"| {row.route} | {row.skipped} |" + " |" * (len(COLUMNS) - 2))
            continue
        good, hot, cpu = row.well_behaved, row.tenants[HOT], row.cpu
        cells = (
            f"{row.route}{' ⚠' if row.distrust() else ''}",
            f"{row.requests_per_s:.1f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.hit_rate:.0%}",
            f"{good.p50_ms:,.0f}, {good.p99_ms:,.0f}",
            f"{good.unserved} of {good.arrived}",
            f"{good.work / 1e3:,.0f}",
            f"{hot.p50_ms:,.0f}, {hot.p99_ms:,.0f}",
            f"{hot.unserved} of {hot.arrived}",
            f"{hot.work / 1e3:,.0f}",
            f"{row.everybody.refused}",
            f"{cpu.client:.0f}, {cpu.engines:.0f}, {cpu.router:.0f} ({cpu.busiest_router:.0f})",
            f"{row.lag_p99_ms:.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _tenant_table(rows: Sequence[Row]) -> str:
    lines = [
        "P50 / P99 ms to the first token, and share of the cost served, tenant by tenant:",
        "",
        "| route | " + " | ".join(TENANTS) + " |",
        "|---|" + "--:|" * len(TENANTS),
    ]
    for row in rows:
        if row.skipped:
            continue
        cells = [
            f"{tenant.p50_ms:,.0f} / {tenant.p99_ms:,.0f}, {tenant.cost / max(1.0, row.everybody.cost):.0%}"
            for tenant in row.tenants.values()
        ]
        lines.append(f"| {row.route} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _distrust(rows: Sequence[Row]) -> str:
    doubted = [f"- {row.route} at {row.factor:g} ×: {reason}" for row in rows if (reason := row.distrust())]
    if not doubted:
        doubted = [
            "None: nothing above 80 % of a core, no client late by more than 20 ms, the machine below 85 %."
        ]
    failed = []
    for row in rows:
        if row.failures:
            counts = ", ".join(f"{count} × {what}" for what, count in row.failures.items())
            failed.append(f"- {row.route} at {row.factor:g} ×: {counts}")
    parts = ["## Which rows to distrust", "", *doubted]
    if failed:
        parts += ["", "Refused or failed requests:", "", *failed]
    return "\n".join(parts)

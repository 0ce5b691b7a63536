"""Time and memory as the pool, its tenants and their requests grow together.

Each rung of the ladder is ten times the one before in everything, at the same load a worker: its tenants have a
prefix each, and ask for most of what the pool serves. One process plays all engines and the scheduler, so its time
is that of both; a second row with a plain router shows what the engines alone take, and the difference is the
scheduler's. Times are this machine's and are for orders of magnitude.

Rungs are taken in order until one is thought to take longer than ``LONGEST_S``; the last ones are then worked out
from the time a request takes on the rungs below, and say so.
"""

import os
import resource
import time
from dataclasses import dataclass

from evenhand.simulation.experiments.cases import TrialCase, row_name, run_case
from evenhand.simulation.experiments.experiment import Cell, Claim, Experiment, Measured, Page, Results, Table
from evenhand.simulation.experiments.figure import Axis, Figure, Point, Series
from evenhand.simulation.experiments.page import number, plan_line
from evenhand.simulation.experiments.scenes import Crowd, Stream, scene

OURS, PLAIN = "evenhand", "fcfs-least-load"
PER_WORKER_PER_S = 40.0
LADDER = ((10, 100, 10_000), (100, 1_000, 100_000), (1_000, 10_000, 1_000_000))
"""Workers, tenants, requests."""
POLICIES = (OURS, PLAIN)
LONGEST_S = 1_500.0
"""Processor time a rung may be thought to take."""
PILOT_REQUESTS = 2_000
"""Of a rung, run first to think how long it takes."""
BYTES_PER_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Rung:
    """One size."""

    policy: str
    workers: int
    tenants: int
    requests: int


def cells() -> tuple[Cell, ...]:
    """All rungs for both."""
    return tuple(
        Cell(f"{policy}/{workers} workers", Rung(policy, workers, tenants, requests), (policy,))
        for workers, tenants, requests in LADDER
        for policy in POLICIES
    )


def case_of(rung: Rung, requests: int) -> TrialCase:
    """The trial of a rung with so many requests."""
    rate = PER_WORKER_PER_S * rung.workers
    stream = Stream(
        "tenant",
        rate,
        prompt_tokens=128,
        prefix_tokens=256,
        output_tokens=16,
        identities=rung.tenants,
    )
    plan = Crowd((stream,), duration_s=requests / rate, kv_blocks=512)
    return TrialCase(rung.policy, scene(f"{rung.workers} workers", plan), workers=rung.workers)


def measure_scale(rung: Rung, seed: int) -> Measured:
    """Processor seconds and memory of a rung, or what they are thought to be from a part of it."""
    pilot = min(PILOT_REQUESTS * max(1, rung.workers // 100), rung.requests)
    pilot_s, _ = _run(rung, pilot, seed)
    if pilot_s * rung.requests / pilot > LONGEST_S:
        return {"cpu_s": pilot_s * rung.requests / pilot, "memory_mb": 0.0, "whole": 0.0, "requests": pilot}
    cpu_s, served = _run(rung, rung.requests, seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if os.uname().sysname == "Darwin" else 1_024
    return {"cpu_s": cpu_s, "memory_mb": peak * unit / BYTES_PER_MB, "whole": 1.0, "requests": served}


def _run(rung: Rung, requests: int, seed: int) -> tuple[float, int]:
    begun_s = time.process_time()
    result = run_case(case_of(rung, requests), seed)
    return time.process_time() - begun_s, sum(outcome.served for outcome in result.outcomes)


def page(results: Results) -> Page:
    """The ladder, and what a request costs on each rung."""
    rows = []
    for workers, tenants, requests in LADDER:
        for policy in POLICIES:
            label = f"{policy}/{workers} workers"
            seconds = results.spread(label, "cpu_s").median
            memory = results.spread(label, "memory_mb").median
            whole = results.spread(label, "whole").least == 1.0
            rows.append(
                (
                    row_name(policy),
                    number(workers),
                    number(tenants),
                    number(requests),
                    number(seconds) if whole else f"about {number(seconds)}",
                    number(seconds / requests * 1e6),
                    number(memory) if whole else "–",
                    "whole" if whole else f"from {number(results.spread(label, 'requests').median)} requests",
                )
            )
    columns = (
        "policy",
        "workers",
        "tenants",
        "requests",
        "processor time (s)",
        "a request (µs)",
        "memory (MB)",
        "run",
    )
    top = f"{OURS}/{LADDER[-1][0]} workers"
    whole = results.spread(top, "whole").least == 1.0
    workers, tenants, requests = LADDER[-1]
    text = f"{number(workers)} workers, {number(tenants)} tenants and {number(requests)} requests run to their end"
    claim = Claim(text, f"{number(results.spread(top, 'cpu_s').median)} s of processor time", whole)
    lines = tuple(
        Series(
            policy,
            tuple(
                Point(workers, results.spread(f"{policy}/{workers} workers", "cpu_s").median / requests * 1e6)
                for workers, _, requests in LADDER
            ),
            strong=policy == OURS,
        )
        for policy in POLICIES
    )
    figure = Figure(
        "Processor time of a simulated request",
        Axis("workers (ten tenants and a thousand requests for each)", logarithmic=True),
        Axis("time of a request, engines included (µs)", logarithmic=True),
        lines,
    )
    rung = Rung(OURS, *LADDER[0])
    return Page((claim,), (Table("Ladder", columns, tuple(rows)),), (("", figure),),
                (plan_line(case_of(rung, rung.requests).scene.plan, ("here the first rung",)),))  # fmt: skip


SCALE = Experiment(
    "scale",
    "What do a thousand workers, ten thousand tenants and a million requests take in time and memory?",
    cells,
    measure_scale,
    page,
    seeds=1,
    timed=True,
)

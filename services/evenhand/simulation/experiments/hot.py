"""One hot tenant with a shared prefix beside well-behaved ones: the first figure the scheduler must show."""

from evenhand.simulation.experiments.cases import Scene, TrialCase, label_of, measure_case, trial_cell
from evenhand.simulation.experiments.experiment import Cell, Claim, Experiment, Page, Results, Table
from evenhand.simulation.experiments.page import plan_line, told
from evenhand.simulation.trials.workloads import WORKLOADS

HOT_TENANT = WORKLOADS["hot-tenant"]
SCENE = Scene(HOT_TENANT.name, HOT_TENANT.make, HOT_TENANT.settings(**HOT_TENANT.given))
CROWDED = Scene(
    "hot-tenant, others over their share too",
    HOT_TENANT.make,
    HOT_TENANT.settings(**(dict(HOT_TENANT.given) | {"other_per_second": 8.0, "duration_s": 30.0})),
)
CROWDED_UNTIL_S = 30.0
OURS, VTC, GREEDY = "evenhand", "vtc-affine", "longest-prefix"


def cells() -> tuple[Cell, ...]:
    """Ours, VTC with an affine worker, and greedy longest prefix."""
    return (
        *(trial_cell(TrialCase(policy, SCENE)) for policy in (OURS, VTC, GREEDY)),
        *(trial_cell(TrialCase(policy, CROWDED, until_s=CROWDED_UNTIL_S)) for policy in (OURS, VTC, GREEDY)),
    )


def page(results: Results) -> Page:
    """The bounds, each as a ratio seed by seed."""
    ours, vtc, greedy = (label_of(SCENE.name, policy) for policy in (OURS, VTC, GREEDY))
    bounds = (
        ("requests/s ÷ VTC with an affine worker's ≥ 1.4", "requests_per_s", vtc, 1.4, True),
        ("requests/s ÷ greedy longest prefix's ≥ 0.80", "requests_per_s", greedy, 0.80, True),
        ("well-behaved P99 TTFT ÷ VTC's ≤ 1", "well_behaved_p99_s", vtc, 1.0, False),
        ("well-behaved P99 TTFT ÷ greedy's ≤ 1/20", "well_behaved_p99_s", greedy, 0.05, False),
        ("service difference in cost ÷ VTC's ≤ 2", "cost_difference", vtc, 2.0, False),
    )
    claims = []
    for text, name, other, bound, at_least in bounds:
        ratio = results.ratio(ours, other, name)
        met = ratio.median >= bound if at_least else ratio.median <= bound
        claims.append(Claim(text, told(ratio), met))
    crowded_ours, crowded_vtc = label_of(CROWDED.name, OURS), label_of(CROWDED.name, VTC)
    ratio = results.ratio_of((crowded_ours, "cost_difference"), (crowded_vtc, "tokens_difference"))
    text = "all over their share: service difference, each in what it counts, ÷ VTC's ≤ 2"
    claims.append(Claim(text, told(ratio), ratio.median <= 2.0))
    parameters = (
        plan_line(SCENE.plan, ("4 workers",)),
        plan_line(CROWDED.plan, ("4 workers", f"ends after {CROWDED_UNTIL_S:.0f} s")),
    )
    tables = (_table(results, SCENE), _table(results, CROWDED))
    return Page(tuple(claims), tables, parameters=parameters, remarks=(NOTE,))


NOTE = (
    "Service difference is the widest change of the difference of two tenants' accumulated service while requests "
    "of both wait, in cost tokens (uncached 1, cached 0.1, output 2) or, as VTC counts, in tokens (input 1, "
    "output 2). The well-behaved of the first workload hardly ever wait, so it is also taken where the others ask "
    "for more than their share as well; there each policy is judged by what it counts itself."
)


def _table(results: Results, scene: Scene) -> Table:
    columns = ("policy", "requests/s", "tokens/s", "hit rate", "well-behaved P99 TTFT (s)", "difference (cost)",
               "difference (tokens)")  # fmt: skip
    names = ("requests_per_s", "tokens_per_s", "hit_rate", "well_behaved_p99_s", "cost_difference",
             "tokens_difference")  # fmt: skip
    rows = []
    for policy in (OURS, VTC, GREEDY):
        label = label_of(scene.name, policy)
        rows.append((policy, *(told(results.spread(label, name)) for name in names)))
    return Table(scene.name, columns, tuple(rows))


HOT = Experiment(
    "hot",
    "With one hot tenant at several times its share, how close do we come to greedy's throughput and to VTC's "
    "fairness at once?",
    cells,
    measure_case,
    page,
    prints=True,
)

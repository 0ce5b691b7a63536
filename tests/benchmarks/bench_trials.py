"""How fast policy experiments run: requests a second of CPU time on one core, four workers.

    python -m tests.benchmarks.bench_trials [POLICY …]

The workload is the hot tenant's, below capacity and beyond; making it is not counted, running and booking it is.
The aim is 8,000 requests a second for a simple policy. CPU time, so that other load on the machine counts little.
"""

import gc
import sys
import time

from evenhand.policies.table import make_policy
from evenhand.simulation.trials.trial import run_trial
from evenhand.simulation.trials.workloads import HotTenant, hot_tenant

AIM_PER_S = 8_000
POLICIES = (
    "fcfs-round-robin",
    "fcfs-least-load",
    "longest-prefix",
    "cache-aware",
    "vtc",
    "dlpm",
    "d2lpm",
    "evenhand",
)
SMOOTH = HotTenant(duration_s=120.0, hot_per_second=24.0, hot_prefixes=1, output_tokens=200, slots=32)
"""Below capacity, prompts of 6,200 tokens: the engines' blocks cost most."""
SHORT = HotTenant(
    duration_s=60.0, hot_per_second=60.0, hot_prefixes=1, prefix_tokens=1_000, output_tokens=200, slots=32
)
"""Below capacity, prompts of 1,200 tokens: what engine benchmarks take for usual."""
OVERLOAD = HotTenant()
"""Beyond capacity: long queues, which cost the policies that look through them."""


def main() -> None:
    """Print one line a policy and workload."""
    for label, plan in (("short", SHORT), ("smooth", SMOOTH), ("overload", OVERLOAD)):
        workload = hot_tenant(plan, 1)
        for name in sys.argv[1:] or POLICIES:
            policy = make_policy(name)
            gc.collect()
            began = time.process_time()
            result = run_trial(policy, workload)
            taken = time.process_time() - began
            rate = len(result.outcomes) / taken
            print(f"{label:9} {name:18} {len(result.outcomes):6} requests  {rate:8,.0f} a second of one core")
    print(f"aim: {AIM_PER_S:,} for a simple policy")


if __name__ == "__main__":
    main()

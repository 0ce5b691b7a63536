"""P1–P7 and what goes with them at every step of adversarial runs; each run is replayed by its seed.

``run_seeds`` runs as many seeds as there is time for; here are a few hundred, one kind of unkindness at a time,
all of them together, and every seed that ever failed.
"""

import pytest
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from tests.properties.adversary import FEATURES, Adversary, Unkindness, only, play
from tests.properties.run_seeds import kept_seeds

KINDS = {
    "plain": Unkindness(),
    "one_worker": Unkindness(workers_max=1),
    "many_tenants": Unkindness(tenants_max=12),
    "one_sided": Unkindness(one_sided=True),
    **{feature: only(feature) for feature in FEATURES},
    "everything": only(*FEATURES),
}
SEEDS_OF_A_KIND = 5
SEEDS = 250
SEEDS_AT_ONCE = 25


@pytest.mark.parametrize("kind", KINDS)
def test_the_properties_hold_at_every_step(kind: str) -> None:
    for seed in range(SEEDS_OF_A_KIND):
        print(f"seed {seed} of {kind}")
        Adversary(seed, KINDS[kind]).run()


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_AT_ONCE))
def test_the_properties_hold_in_any_world(first: int) -> None:
    for seed in range(first, first + SEEDS_AT_ONCE):
        print(f"seed {seed}: python -m tests.properties.run_seeds --from {seed} --count 1 --again")
        play(seed)


@pytest.mark.parametrize("seed", kept_seeds())
def test_seeds_that_failed_once_hold(seed: int) -> None:
    play(seed)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 31),
    features=st.sets(st.sampled_from(FEATURES)),
    tenants=st.integers(2, 8),
    workers=st.integers(1, 5),
    slots=st.lists(st.sampled_from([1, 2, 3, 8, 16]), min_size=1, max_size=3),
)
@example(seed=0, features=set(FEATURES), tenants=8, workers=5, slots=[1])
def test_the_properties_hold_whatever_the_shape(
    seed: int, features: set[str], tenants: int, workers: int, slots: list[int]
) -> None:
    on = dict.fromkeys(sorted(features), True)
    unkindness = Unkindness(tenants_max=tenants, workers_max=workers, slots=tuple(slots), grants=80, **on)
    note(f"Adversary({seed}, {unkindness}).run()")
    Adversary(seed, unkindness).run()

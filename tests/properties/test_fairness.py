"""P1, P2, P3, P5, P6 and P7 at every step of adversarial runs; the seed is in the test's name."""

import pytest
from tests.properties.adversary import Adversary, Unkindness

KINDS = {
    "plain": Unkindness(),
    "one_worker": Unkindness(workers_max=1),
    "many_tenants": Unkindness(tenants_max=12),
    "worker_loss": Unkindness(worker_loss=True),
    "worker_sizes": Unkindness(worker_sizes=True),
    "tight_kv": Unkindness(tight_kv=True),
    "weight_changes": Unkindness(weight_changes=True),
    "limits": Unkindness(limits=True),
    "cancels": Unkindness(cancels=True, expiry=True),
    "restarts": Unkindness(restarts=True),
    "one_sided": Unkindness(one_sided=True),
    "scaled_window": Unkindness(scaled_window=True),
    "everything": Unkindness(
        worker_loss=True,
        worker_sizes=True,
        weight_changes=True,
        limits=True,
        cancels=True,
        expiry=True,
        scaled_window=True,
        deadlines=True,
        retries=True,
        restarts=True,
    ),
}
SEEDS = 8


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_the_properties_hold_at_every_step(kind: str, seed: int) -> None:
    Adversary(seed, KINDS[kind]).run()

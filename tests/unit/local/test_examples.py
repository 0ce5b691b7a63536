"""The example files of the docs are read by the code that they are for."""

from pathlib import Path

from evenhand.local.stack_file import load_stack
from evenhand.postgres.seed import read_seed

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"


def test_the_stack_file_is_one() -> None:
    stack = load_stack(EXAMPLES / "stack.yaml")
    assert [worker.name for worker in stack.workers] == ["gpu-1", "gpu-2.internal-8000"]
    assert {tenant.tenant_id: tenant.weight for tenant in stack.tenants} == {"search": 3.0, "batch": 1.0}


def test_the_seed_file_is_one() -> None:
    seed = read_seed(EXAMPLES / "seed.yaml")
    assert [key.principal for key in seed.api_keys] == ["search-backend", "gateway"]
    assert len(seed.tenants) == 3

"""The master secret: one file, for its owner alone."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evenhand.core.block_key import domain_salt
from evenhand.core.errors import InvalidConfig
from evenhand.core.facts import TenantSpec
from evenhand.core.ids import PoolId, TenantId
from evenhand.ports import PoolSpec
from evenhand.scheduler.secret import MasterSecret, cache_domain, load_master_secret

POOL = PoolSpec(PoolId("pool"), "model", 16, "evenhand.block.v1", salt_generation=3)


def test_it_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "master.secret"
    first = load_master_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = load_master_secret(path)
    assert first.salt(POOL, "tenant:a") == again.salt(POOL, "tenant:a")
    assert list(path.parent.iterdir()) == [path]


def test_two_first_starts_agree(tmp_path: Path) -> None:
    path = tmp_path / "master.secret"
    with ThreadPoolExecutor(8) as threads:
        secrets = list(threads.map(lambda _: load_master_secret(path).ticket_key("pool"), range(8)))
    assert len(set(secrets)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "master.secret"
    load_master_secret(path)
    path.chmod(mode)
    with pytest.raises(InvalidConfig, match="may be read by others"):
        load_master_secret(path)


@pytest.mark.parametrize("content", ["", "not hex", "abcd", "zz" * 32])
def test_a_file_that_holds_no_secret_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "master.secret"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(InvalidConfig) as refused:
        load_master_secret(path)
    assert content == "" or content not in str(refused.value)


def test_a_folder_is_no_secret(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no regular file"):
        load_master_secret(tmp_path)


def test_it_does_not_show_itself() -> None:
    secret = MasterSecret(b"s" * 32)
    assert "s" * 8 not in repr(secret)
    assert secret.salt(POOL, "tenant:a") == domain_salt(b"s" * 32, "pool", "tenant:a", 3)


def test_pools_and_domains_are_kept_apart() -> None:
    secret = MasterSecret(b"s" * 32)
    assert secret.ticket_key("a") != secret.ticket_key("b")
    alone = cache_domain(TenantSpec(TenantId("acme")))
    group = cache_domain(TenantSpec(TenantId("other"), cache_domain="acme"))
    assert alone != group
    assert secret.salt(POOL, alone) != secret.salt(POOL, group)
    assert cache_domain(TenantSpec(TenantId("third"), cache_domain="acme")) == group

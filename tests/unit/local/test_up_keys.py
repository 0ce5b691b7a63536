"""The API keys that ``evenhand up`` keeps."""

import stat
from pathlib import Path

import pytest

from evenhand.core.errors import InvalidConfig
from evenhand.local.up import KEYS_FILE, known_keys, main, remember_keys


def test_keys_are_kept_for_their_owner_alone(tmp_path: Path) -> None:
    assert known_keys(tmp_path) == {}
    remember_keys(tmp_path, {"red": "eh_1"})
    remember_keys(tmp_path, {"red": "eh_1", "blue": "eh_2"})
    assert known_keys(tmp_path) == {"red": "eh_1", "blue": "eh_2"}
    assert stat.S_IMODE((tmp_path / KEYS_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["{", "[]", '{"red": 1}', "\udcff"])
def test_a_broken_file_stops_the_start_before_anything_runs(tmp_path: Path, content: str) -> None:
    (tmp_path / KEYS_FILE).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InvalidConfig, match=r"The file of API keys .*api_keys\.json"):
        main(["--worker", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [KEYS_FILE]

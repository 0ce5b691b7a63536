"""The checkpoint file: whole or nothing."""

import os
import stat
from pathlib import Path

import pytest
from tests.unit.worker.engine_frames import CLEARED, feed, removed, stored, tokens, translator

from evenhand.core.ids import Epoch, Seq
from evenhand.worker.checkpoint import (
    MAGIC,
    EdgeCheckpoint,
    decode_checkpoint,
    encode_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from evenhand.worker.continuity import FramePosition


def checkpoint(names: str = "int") -> EdgeCheckpoint:
    subject = translator()
    one, two = (1, 2**64 - 1) if names == "int" else (b"a" * 32, b"b" * 32)
    feed(subject, stored([one, two], tokens(0, 2)), stored([one], tokens(0, 1)), removed(one))
    feed(subject, stored([one], tokens(0, 1), medium="CPU"))
    feed(subject, stored([5], tokens(0, 1), group_idx=2, kv_cache_spec_kind="mamba"))
    return EdgeCheckpoint("w", "m", Epoch(9), Seq(1_000_010), FramePosition(4, b"d" * 32), 1234, subject.state())


@pytest.mark.parametrize("names", ["int", "bytes"])
def test_what_is_written_is_what_is_read(tmp_path: Path, names: str) -> None:
    path = tmp_path / "deep" / "w.checkpoint"
    before = checkpoint(names)
    write_checkpoint(path, encode_checkpoint(before))
    assert read_checkpoint(path, "w", "m") == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_an_empty_start_is_a_checkpoint_too() -> None:
    before = EdgeCheckpoint("w", "m", Epoch(9), Seq(5), None, None, translator().state())
    assert decode_checkpoint(encode_checkpoint(before), "w", "m") == before


def test_a_torn_or_changed_file_is_none() -> None:
    data = encode_checkpoint(checkpoint())
    for end in range(0, len(data), 7):
        assert decode_checkpoint(data[:end], "w", "m") is None
    for at in range(0, len(data), 11):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        assert decode_checkpoint(changed, "w", "m") is None
    assert decode_checkpoint(data + b"x", "w", "m") is None


def test_a_foreign_file_is_none(tmp_path: Path) -> None:
    data = encode_checkpoint(checkpoint())
    assert decode_checkpoint(data, "other", "m") is None
    assert decode_checkpoint(data, "w", "other") is None
    assert decode_checkpoint(data.replace(b"checkpoint 1", b"checkpoint 2"), "w", "m") is None
    assert read_checkpoint(tmp_path / "missing", "w", "m") is None
    assert read_checkpoint(tmp_path, "w", "m") is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.checkpoint"
    write_checkpoint(path, b"old")

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name]


def test_no_token_is_in_it() -> None:
    subject = translator()
    secret = [0x5EC2E701 + index for index in range(8)]
    feed(subject, CLEARED, stored([1], secret[:4]), stored([9], secret[4:], parent=8))
    data = encode_checkpoint(EdgeCheckpoint("w", "m", Epoch(9), Seq(5), None, None, subject.state()))
    assert data.startswith(MAGIC)
    for token in secret:
        assert token.to_bytes(4, "little") not in data
        assert token.to_bytes(4, "big") not in data

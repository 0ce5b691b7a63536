"""When a position is trusted, doubted and given up: the cursor's table, without a broker."""

import pytest

from evenhand.kafka.cursor import Cursor
from evenhand.ports import LogPosition, LogRecord, LogReplaced


def record(offset: int, value: bytes = b"v") -> LogRecord:
    return LogRecord("t", 0, offset, b"k", value, 1_000 + offset)


def after(last: LogRecord) -> Cursor:
    return Cursor.at("t", 0, LogPosition(last.offset + 1, last.digest()))


def test_a_resumed_cursor_asks_for_the_record_before_and_hands_out_only_what_follows() -> None:
    cursor = after(record(4))
    assert (cursor.doubted, cursor.fetch_offset) == (True, 4)
    assert cursor.accept([record(4), record(5)]) == [record(5)]
    assert (cursor.doubted, cursor.fetch_offset, cursor.digest_before) == (False, 6, record(5).digest())


def test_a_fresh_cursor_has_nothing_to_doubt() -> None:
    cursor = Cursor.at("t", 0, LogPosition(0))
    cursor.doubt()
    assert (cursor.doubted, cursor.fetch_offset) == (False, 0)
    assert cursor.accept([record(0)]) == [record(0)]
    cursor.doubt()
    assert (cursor.doubted, cursor.fetch_offset) == (True, 0)


@pytest.mark.parametrize("first", [record(4, b"another"), record(5), record(9)])
def test_another_record_before_the_position_is_another_log(first: LogRecord) -> None:
    with pytest.raises(LogReplaced, match="offset 5"):
        after(record(4)).accept([first])


def test_a_record_without_a_time_is_one_like_another() -> None:
    timeless = LogRecord("t", 0, 4, b"k", b"v", -1)
    assert after(timeless).accept([timeless, record(5)]) == [record(5)]


def test_an_equal_record_of_another_time_is_another_log() -> None:
    twin = LogRecord("t", 0, 4, b"k", b"v", 7)
    with pytest.raises(LogReplaced):
        after(record(4)).accept([twin])


def test_a_position_without_digest_demands_only_that_the_record_exists() -> None:
    cursor = Cursor.at("t", 0, LogPosition(5))
    assert cursor.accept([record(4, b"whatever")]) == []
    with pytest.raises(LogReplaced):
        Cursor.at("t", 0, LogPosition(5)).accept([record(6)])


def test_silence_counts_only_when_the_broker_answered_twice_in_one_doubt() -> None:
    cursor = after(record(4))
    cursor.broker_answered_in_silence()
    cursor.doubt()  # the connection was lost in between: all over again
    cursor.broker_answered_in_silence()
    with pytest.raises(LogReplaced):
        cursor.broker_answered_in_silence()


def test_a_record_ends_the_silence() -> None:
    cursor = after(record(4))
    cursor.broker_answered_in_silence()
    cursor.silent_ms = 400.0
    cursor.accept([record(4)])
    assert cursor.silent_ms == 0.0
    assert not cursor.answered_in_silence


def test_retention_up_to_exactly_the_position_loses_nothing() -> None:
    cursor = after(record(4))
    cursor.trimmed_to(5)
    assert (cursor.doubted, cursor.fetch_offset) == (False, 5)
    assert cursor.accept([record(5)]) == [record(5)]


@pytest.mark.parametrize("first_offset", [0, 4, 6, 100])
def test_any_other_beginning_is_another_log(first_offset: int) -> None:
    with pytest.raises(LogReplaced):
        after(record(4)).trimmed_to(first_offset)


def test_a_fresh_cursor_begins_where_the_log_does() -> None:
    cursor = Cursor.at("t", 0, LogPosition(0))
    cursor.trimmed_to(70)
    assert (cursor.doubted, cursor.fetch_offset) == (False, 70)
    cursor.trimmed_to(90)
    assert cursor.fetch_offset == 90

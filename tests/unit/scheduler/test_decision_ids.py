"""Decision ids are UUIDs of version 7, ever growing."""

import uuid

from evenhand.scheduler.decision_ids import DecisionIds


def test_ids_are_uuid7_and_grow() -> None:
    ids = DecisionIds()
    made = [ids.next() for _ in range(10_000)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)
    assert all(uuid.UUID(text).version == 7 and uuid.UUID(text).variant == uuid.RFC_4122 for text in made)


def test_two_processes_do_not_meet() -> None:
    first, second = DecisionIds().next(), DecisionIds().next()
    assert first[-12:] != second[-12:]

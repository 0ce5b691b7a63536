"""Where one partition is read on, and the doubt whether it is still the same log.

A memory-only broker that restarts begins at offset 0 again, and a fetch beyond its end waits for ever without an
error; once it has grown past a reader's position, that reader would go on in the middle of another history.
So whenever a connection was lost, and when nothing has come for long, a position is **doubted**: the record just
before it is read again, and its digest compared. Another record, or silence from a broker that answers, means
another log.

::

    trusted ──doubt()──▶ doubted ──record before matches──▶ trusted
                            │
                            └──another record, or silence──▶ LogReplaced

Pure: time comes as the length of polls, records as arguments. A cursor that has read nothing has nothing to doubt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evenhand.ports import LogPosition, LogRecord, LogReplaced


@dataclass(slots=True)
class Cursor:
    """One partition's position. ``accept`` and ``trimmed_to`` move it on."""

    topic: str
    partition: int
    next_offset: int
    digest_before: bytes
    started: bool
    """False: nothing was ever read here, and reading begins wherever the log does."""
    doubted: bool = False
    silent_ms: float = 0.0
    """Length of the polls that showed nothing since the last record or doubt."""
    answered_in_silence: bool = False
    """The broker has answered once in this doubt, and yet the record before did not come."""

    @classmethod
    def at(cls, topic: str, partition: int, position: LogPosition) -> "Cursor":
        started = position.next_offset > 0
        return cls(topic, partition, position.next_offset, position.digest_before, started, doubted=started)

    @property
    def fetch_offset(self) -> int:
        """Where to fetch: one earlier while in doubt."""
        return self.next_offset - 1 if self.doubted else self.next_offset

    def doubt(self) -> None:
        """Ask for the record before again; the caller then seeks to ``fetch_offset``."""
        self.doubted = self.started
        self.silent_ms, self.answered_in_silence = 0.0, False

    def replaced(self) -> LogReplaced:
        return LogReplaced(self.topic, self.partition, self.next_offset)

    def trimmed_to(self, first_offset: int) -> None:
        """The fetch was out of range and the log begins at ``first_offset``: raise ``LogReplaced`` or go on there.

        Retention may have taken everything up to exactly this position; nothing unread is lost then.
        """
        if self.started and first_offset != self.next_offset:
            raise self.replaced()
        self.next_offset, self.digest_before = first_offset, b""
        self.started = self.doubted = False
        self.silent_ms = 0.0

    def accept(self, records: Sequence[LogRecord]) -> Sequence[LogRecord]:
        """Take what was fetched (at least one record); return what is new. Raises ``LogReplaced``."""
        self.silent_ms = 0.0
        if self.doubted:
            before = records[0]
            if before.offset != self.next_offset - 1:
                raise self.replaced()
            if self.digest_before and before.digest() != self.digest_before:
                raise self.replaced()
            self.doubted = self.answered_in_silence = False
            records = records[1:]
        if records:
            self.next_offset = records[-1].offset + 1
            self.digest_before = records[-1].digest()
            self.started = True
        return records

    def broker_answered_in_silence(self) -> None:
        """In doubt and silent, and the broker answers: ask once more, then raise ``LogReplaced``."""
        if self.answered_in_silence:
            raise self.replaced()
        self.silent_ms, self.answered_in_silence = 0.0, True

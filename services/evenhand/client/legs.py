"""The legs of one request in ``run``, and how a leg ended whose block was left.

Pure: no waiting and no calls, shared by both clients.
"""

import uuid
from typing import Any

from evenhand.client.errors import InvalidRequest
from evenhand.client.grant import Grant, Outcome, TicketState


class Legs:
    """The legs of one request in ``run``: what to ask for next, and whether to ask at all."""

    def __init__(self, request: dict[str, Any], legs_max: int) -> None:
        if legs_max < 1:
            raise InvalidRequest(f"legs_max must be at least 1, not {legs_max}.")
        self.request = {"request_id": uuid.uuid4().hex, **request}
        self._left = legs_max - 1

    @property
    def is_last(self) -> bool:
        return self._left == 0

    def another(self, grant: Grant | None, error: BaseException) -> bool:
        """Whether the leg that ended in ``error`` is followed by another one."""
        lost = grant is not None and (grant._worker_failed or grant.state is TicketState.WORKER_LOST)
        if grant is None or not lost or self.is_last or not isinstance(error, Exception):
            return False
        self._left -= 1
        excluded = (*self.request.get("excluded_workers", ()), grant.worker_id)
        self.request = {**self.request, "excluded_workers": excluded}
        return True


def outcome_of(grant: Grant, error: BaseException | None) -> Outcome:
    """How a leg ended whose block was left with ``error``."""
    if grant._worker_failed:
        return Outcome.WORKER_LOST
    if error is None:
        return Outcome.COMPLETED
    return Outcome.FAILED if isinstance(error, Exception) else Outcome.CANCELLED

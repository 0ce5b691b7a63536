"""Names of things. One ``NewType`` for every identifier, so that mypy keeps them apart."""

from typing import NewType

WorkerId = NewType("WorkerId", str)
"""One engine rank: a vLLM replica, or one data-parallel rank of it. At most 200 characters."""

PoolId = NewType("PoolId", str)
"""Workers that can stand in for each other: same model, block size and key scheme."""

TenantId = NewType("TenantId", str)
"""A customer of the platform."""

RequestId = NewType("RequestId", str)
"""Chosen by the client, unique within its tenant while open; the idempotency key of Acquire."""

TicketId = NewType("TicketId", str)
"""A granted place on a worker; unique for ever (term, then a counter, then the leg)."""

Epoch = NewType("Epoch", int)
"""One life of a worker's cache. Only grows: ``max(clock ms, highest known + 1)``."""

Seq = NewType("Seq", int)
"""Number of a batch within one epoch of one worker, from 1, without holes."""

BlockKey = NewType("BlockKey", int)
"""Unsigned 64-bit content key of one block, chained from its parent. See ``core.block_key``."""

"""Whether a worker that announces itself can stand in for the others of its pool.

Keys of one pool are comparable only if all its workers run the same model with the same block size under the same
key scheme; one that differs would match nothing, or worse, the wrong thing. It is refused at registration, with
the reason. The salt's generation is not compared: it grows while workers run, and keys carry it by themselves.
"""

from typing import Protocol

from evenhand.core.block_key import KEY_SCHEME
from evenhand.core.ids import PoolId
from evenhand.core.kv import WorkerAnnounced


class PoolFacts(Protocol):
    """What all workers of a pool have in common; ``ports.PoolSpec`` is one."""

    @property
    def pool_id(self) -> PoolId: ...

    @property
    def model(self) -> str: ...

    @property
    def block_size_tokens(self) -> int: ...

    @property
    def key_scheme(self) -> str: ...


def check_announcement(pool: PoolFacts | None, announced: WorkerAnnounced) -> str | None:
    """Why the worker is refused, in one sentence; None if it is welcome. ``pool`` is None while it is unknown."""
    who = f"Worker {announced.worker_id} cannot join pool {announced.pool_id}:"
    if announced.key_scheme != KEY_SCHEME:
        return f"{who} its key scheme is {announced.key_scheme!r}, and this build knows {KEY_SCHEME!r} only."
    if pool is None:
        return None
    if announced.pool_id != pool.pool_id:
        return f"{who} it was compared with pool {pool.pool_id}."
    if announced.key_scheme != pool.key_scheme:
        return f"{who} its key scheme is {announced.key_scheme!r}, the pool's is {pool.key_scheme!r}."
    if announced.block_size_tokens != pool.block_size_tokens:
        size = announced.block_size_tokens
        return f"{who} its block size is {size} tokens, the pool's is {pool.block_size_tokens}."
    if announced.model != pool.model:
        return f"{who} its model is {announced.model!r}, the pool's is {pool.model!r}."
    return None

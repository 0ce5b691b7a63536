"""What a client knows of its pool: enough to compute block keys before it asks for a place.

Resolved once for each tenant and kept until a grant names another salt generation or a request is refused as
invalid. Keys of an old generation match nothing, so a stale view costs cache hits and never mixes domains.

Always: at most ``VIEWS_MAX`` views are kept; the least recently used goes first.
"""

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from evenhand.client.errors import InvalidRequest, UnexpectedAnswer
from evenhand.core.block_key import KEY_SCHEME, block_keys, pack_keys, root_hash
from evenhand.wire.generated import scheduler_pb2 as pb

VIEWS_MAX = 1_024


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool as one tenant sees it."""

    pool: str
    tenant: str
    model: str
    block_size_tokens: int
    key_scheme: str
    cache_domain: str
    salt_generation: int
    cache_salt: str = field(repr=False)

    def packed_keys(self, tokens: Sequence[int], lora: str = "") -> bytes:
        """Keys of all whole blocks of a prompt as they travel; raises ``InvalidRequest`` for a bad token id."""
        root = root_hash(self.model, lora, self.cache_salt)
        try:
            return pack_keys(block_keys(tokens, self.block_size_tokens, root))
        except (struct.error, TypeError) as error:
            raise InvalidRequest("Token ids must be whole numbers from 0 to 4294967295.") from error


def view_of(response: pb.ResolveResponse) -> PoolView:
    """Raises ``UnexpectedAnswer`` where this build cannot compute the pool's keys."""
    if response.key_scheme != KEY_SCHEME:
        raise UnexpectedAnswer(
            f"Pool {response.pool} uses key scheme {response.key_scheme!r}, and this client knows {KEY_SCHEME!r}."
        )
    if response.block_size_tokens < 1:
        raise UnexpectedAnswer(f"Pool {response.pool} says its block size is {response.block_size_tokens}.")
    return PoolView(
        pool=response.pool,
        tenant=response.tenant,
        model=response.model,
        block_size_tokens=response.block_size_tokens,
        key_scheme=response.key_scheme,
        cache_domain=response.cache_domain,
        salt_generation=response.salt_generation,
        cache_salt=response.cache_salt,
    )


class PoolViews:
    """The views of one client, by tenant."""

    def __init__(self) -> None:
        self._views: OrderedDict[str, PoolView] = OrderedDict()

    def get(self, tenant: str) -> PoolView | None:
        """The view, if it is known."""
        view = self._views.get(tenant)
        if view is not None:
            self._views.move_to_end(tenant)
        return view

    def put(self, tenant: str, view: PoolView) -> None:
        self._views[tenant] = view
        self._views.move_to_end(tenant)
        while len(self._views) > VIEWS_MAX:
            self._views.popitem(last=False)

    def seen_generation(self, tenant: str, generation: int) -> None:
        """A grant named this generation: forget a view of another one."""
        view = self._views.get(tenant)
        if view is not None and generation and view.salt_generation != generation:
            del self._views[tenant]

    def forget(self, tenant: str) -> None:
        self._views.pop(tenant, None)

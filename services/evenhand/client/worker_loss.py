"""Whether an exception says that a worker did not answer or broke off.

Client libraries wrap the socket's error in their own, so the chain of causes is walked. Their classes are known by
name, for this package imports none of them. A worker that answers an error (500, 400) is there, and a slow answer
(a read time-out) is not a lost worker either: both are the caller's to judge.
"""

_LOSSES = frozenset(
    {
        "APIConnectionError",  # openai
        "ConnectError",  # httpx
        "ConnectTimeout",
        "ReadError",
        "WriteError",
        "RemoteProtocolError",
        "ClientConnectorError",  # aiohttp
        "ClientOSError",
        "ClientPayloadError",
        "ServerDisconnectedError",
    }
)
_NO_LOSSES = frozenset({"APITimeoutError", "ReadTimeout", "WriteTimeout", "PoolTimeout"})
_LIBRARIES = ("openai", "httpx", "httpcore", "aiohttp", "h11")
CHAIN_MAX = 16


def is_worker_loss(error: BaseException) -> bool:
    """True for ``ConnectionError`` and the connection errors of openai, httpx and aiohttp, wrapped or not."""
    current: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if current is None:
            return False
        if isinstance(current, ConnectionError):
            return True
        kind = type(current)
        known = kind.__module__.startswith(_LIBRARIES) and kind.__name__ not in _NO_LOSSES
        if known and any(base.__name__ in _LOSSES for base in kind.__mro__):
            return True
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return False

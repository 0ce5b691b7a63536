"""The scheduler daemon: the core's decisions over gRPC, one owner a pool, a warm standby behind it.

``daemon`` composes it; ``actor`` is the single writer; ``live_map`` keeps the cache map forward; ``ownership`` and
``office`` hold the fenced lease and what it allows; ``calls``, ``servicer`` and ``session`` are what clients meet.
"""

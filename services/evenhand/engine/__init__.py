"""A simulated vLLM engine: block pool, continuous batching, the real event wire format, an HTTP server.

``block_pool``, ``content``, ``waiting`` and ``batching`` are pure: no clock, no I/O, no randomness. The
HTTP server paces them by the clock; a simulation advances them on a virtual one. Same code, same choices.
"""

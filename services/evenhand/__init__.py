"""Evenhand: cache-affine and provably fair scheduling of many tenants' requests over vLLM workers."""

__version__ = "0.1.0"

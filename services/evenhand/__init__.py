"""Evenhand: cache-affine and provably fair scheduling of many tenants' requests over vLLM workers."""

from importlib.util import find_spec

__version__ = "0.1.0"


def core_form() -> str:
    """``compiled`` where the modules that decide are extension modules, ``pure`` where they are Python."""
    spec = find_spec("evenhand.core.scheduler")
    return "pure" if spec is None or spec.origin is None or spec.origin.endswith(".py") else "compiled"

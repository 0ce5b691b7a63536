"""What an OpenAI-compatible call to a granted worker must carry."""

from typing import Any

from evenhand.client.grant import Grant


def openai_kwargs(grant: Grant) -> dict[str, Any]:
    """Keyword arguments for ``create(…)`` of the ``openai`` package: cache salt, engine rank and request id.

    Use them on a client of ``base_url=grant.base_url``, for instance
    ``client.with_options(base_url=grant.base_url).completions.create(…, **openai_kwargs(grant))``. The body's
    ``cache_salt`` keeps the cache domain apart; ``X-data-parallel-rank`` names the rank behind a shared address.
    """
    return {
        "extra_body": {"cache_salt": grant.cache_salt},
        "extra_headers": {
            "X-Request-Id": grant.request_id,
            "X-data-parallel-rank": str(grant.data_parallel_rank),
        },
    }

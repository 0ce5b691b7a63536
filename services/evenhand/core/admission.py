"""Whether a request is admitted at all: one answer, at once, in one sentence.

Checks go from what the caller did wrong, over what the pool can never do, to what it cannot do now. A refusal
uses nothing up, and names no tenant but the caller's.
"""

from evenhand.core.facts import Refusal, RefusalReason, Request, SchedulerConfig, TenantState
from evenhand.core.fair_tree import FairTree
from evenhand.core.tenant import Tenant


def refusal_of_shape(request: Request, block_size_tokens: int | None) -> Refusal | None:
    """What is wrong with the request itself; ``block_size_tokens`` is None while no worker is known."""
    sentence: str | None = None
    if request.prompt_tokens < 1:
        sentence = f"The prompt has {request.prompt_tokens} tokens; it needs at least 1."
    elif request.output_tokens_max < 1:
        sentence = f"The output limit is {request.output_tokens_max} tokens; it must be at least 1."
    elif request.output_tokens_expected is not None and request.output_tokens_expected < 0:
        sentence = f"The expected output is {request.output_tokens_expected} tokens; it cannot be negative."
    elif request.size_bytes < 0:
        sentence = f"The size is {request.size_bytes} bytes; it cannot be negative."
    elif block_size_tokens is not None and len(request.block_keys) > request.prompt_tokens // block_size_tokens:
        sentence = (
            f"There are {len(request.block_keys)} block keys, but {request.prompt_tokens} prompt tokens make only "
            f"{request.prompt_tokens // block_size_tokens} whole blocks of {block_size_tokens}."
        )
    return Refusal(RefusalReason.INVALID, sentence) if sentence is not None else None


def refusal_of_pool(request: Request, fair: FairTree, config: SchedulerConfig) -> Refusal | None:
    """What the pool's workers cannot do, at present or ever."""
    workers = fair.members.values()
    if not workers:
        return no_worker(config)
    capacity_tokens = max(worker.capacity_tokens for worker in workers)
    tokens_total = request.prompt_tokens + request.output_tokens_max
    if tokens_total > capacity_tokens:
        return Refusal(
            RefusalReason.TOO_LARGE,
            f"Prompt and output limit make {tokens_total} tokens; the largest worker of pool {config.pool_id} "
            f"can hold {capacity_tokens}.",
        )
    return None


def refusal_of_tenant(
    request: Request, tenant: Tenant, queued_total: int, config: SchedulerConfig
) -> Refusal | None:
    """What the tenant's state and bounds, or the pool's bound on all queues, do not allow."""
    spec = tenant.spec
    if spec.state is not TenantState.ACTIVE:
        return Refusal(
            RefusalReason.TENANT_SUSPENDED, f"Tenant {spec.tenant_id} is {spec.state.value}; nothing is admitted."
        )
    sentence: str | None = None
    if len(tenant.queue) >= spec.queue_length_max:
        sentence = f"The queue of tenant {spec.tenant_id} is full: {spec.queue_length_max} requests wait."
    elif tenant.queue_bytes + request.size_bytes > spec.queue_bytes_max:
        sentence = (
            f"The queue of tenant {spec.tenant_id} is full: {tenant.queue_bytes} of {spec.queue_bytes_max} bytes "
            f"are taken and the request has {request.size_bytes}."
        )
    elif queued_total >= config.queued_total_max:
        sentence = f"The queues of pool {config.pool_id} are full: {config.queued_total_max} requests wait."
    if sentence is None:
        return None
    retry_after_ms = tenant.service.retry_after_ms(config.retry_after_default_ms)
    return Refusal(RefusalReason.QUEUE_FULL, sentence, retry_after_ms)


def no_worker(config: SchedulerConfig) -> Refusal:
    """Why nothing is admitted while the pool has no worker; says when to come back."""
    return Refusal(
        RefusalReason.NO_WORKER,
        f"Pool {config.pool_id} has no worker that takes requests.",
        config.retry_after_default_ms,
    )


def same_prompt(known: Request, again: Request, knows_prefix_only: bool) -> bool:
    """Is this the same request once more? Of a ticket of an earlier term only the first keys may be known."""
    if known.prompt_tokens != again.prompt_tokens or known.output_tokens_max != again.output_tokens_max:
        return False
    keys = again.block_keys[: len(known.block_keys)] if knows_prefix_only else again.block_keys
    return tuple(known.block_keys) == tuple(keys)

"""Ask for a place on a worker, call the worker with the openai package, tell what it cost."""

import asyncio
import sys

import openai

from evenhand.client import AsyncClient, openai_kwargs


async def main(pool: str) -> None:
    prompt = list(range(1_000, 1_100))  # token ids, as the model's own tokenizer gives them
    async with AsyncClient(pool=pool) as client, openai.AsyncOpenAI(api_key="none", max_retries=0) as worker:
        model = (await client.resolve()).model
        for _ in range(2):
            async with client.acquire(tokens=prompt, max_output_tokens=16) as grant:
                print(f"{grant.worker_id} at {grant.address}: {grant.explanation.sentence}")
                call = worker.with_options(base_url=grant.base_url).completions.create
                answer = await call(model=model, prompt=prompt, max_tokens=16, **openai_kwargs(grant))
                grant.record_usage(answer.usage)  # leaving the block settles with it, whatever happens
                print(f"{answer.choices[0].text.strip()!r}, {grant.usage}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

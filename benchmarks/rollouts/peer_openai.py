"""What one would write by hand: AsyncOpenAI, a semaphore, a loop over tool calls. BASE_URL N CONCURRENCY"""

import asyncio
import json
import resource
import sys
import time
from pathlib import Path

from common import SYSTEM, TOOL_SCHEMA, prompt
from openai import AsyncOpenAI


def lookup(query: str) -> str:
    return f"Result for {query}: enzalutamide, exemestane and everolimus are listed."


async def main() -> None:
    base_url, num, concurrency = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    client, slots = AsyncOpenAI(base_url=base_url, api_key="x"), asyncio.Semaphore(concurrency)
    counts = {"succeeded": 0, "lost": 0}

    async def one(index: int, out) -> None:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": prompt(index)},
        ]
        async with slots:
            try:
                while True:
                    reply = await client.chat.completions.create(
                        model="fake", messages=messages, tools=[TOOL_SCHEMA]
                    )
                    message = reply.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        break
                    for call in message.tool_calls:
                        content = lookup(**json.loads(call.function.arguments))
                        messages.append(
                            {"role": "tool", "tool_call_id": call.id, "content": content}
                        )
            except Exception:
                counts["lost"] += 1
                return
        out.write(json.dumps({"id": index, "messages": messages}) + "\n")
        counts["succeeded"] += 1

    started = time.perf_counter()
    with Path("openai.jsonl").open("w") as out:  # noqa: ASYNC230
        await asyncio.gather(*(one(index, out) for index in range(num)))
    used = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "wall_s": round(time.perf_counter() - started, 3),
        "rss_mb": round(used.ru_maxrss / 1024, 1),
    }
    print("@@" + json.dumps(figures | counts))


if __name__ == "__main__":
    asyncio.run(main())

"""The same work by verifiers (0.1.x, the line whose ToolEnv runs in this process). BASE_URL N CONCURRENCY"""

import asyncio
import json
import os
import resource
import sys
import time

from common import SYSTEM, prompt

os.environ["FAKE_API_KEY"] = "x"
import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig


def lookup(query: str) -> str:
    """Look up one item.

    Args:
        query: what to look up
    """
    return f"Result for {query}: enzalutamide, exemestane and everolimus are listed."


def is_answered(output: dict) -> bool:
    completion = output.get("completion")
    return not output.get("error") and bool(completion) and "Final Answer" in str(completion[-1])


def main() -> None:
    base_url, num, concurrency = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rows = [{"question": prompt(index), "answer": "x", "example_id": index} for index in range(num)]
    dataset = Dataset.from_list(rows)
    environment = vf.ToolEnv(
        tools=[lookup], dataset=dataset, eval_dataset=dataset, system_prompt=SYSTEM, max_turns=10,
        rubric=vf.Rubric(),
    )  # fmt: skip
    client = ClientConfig(api_key_var="FAKE_API_KEY", api_base_url=base_url)
    started = time.perf_counter()
    done = asyncio.run(
        environment.evaluate(
            client=client, model="fake", num_examples=num, rollouts_per_example=1, max_concurrent=concurrency
        )
    )  # fmt: skip
    wall_s = round(time.perf_counter() - started, 3)
    succeeded = sum(map(is_answered, done["outputs"]))
    rss_mb = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    figures = {"wall_s": wall_s, "rss_mb": rss_mb, "succeeded": succeeded, "lost": num - succeeded}
    print("@@" + json.dumps(figures))


if __name__ == "__main__":
    main()

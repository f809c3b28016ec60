"""The same work by inspect_ai: a basic tool loop over an OpenAI-compatible endpoint. BASE_URL N CONCURRENCY"""

import json
import os
import resource
import sys
import time

from common import SYSTEM, prompt

os.environ |= {"FAKE_API_KEY": "x", "FAKE_BASE_URL": sys.argv[1]}
from inspect_ai import Task, eval  # noqa: A004
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool


@tool
def lookup():
    async def execute(query: str) -> str:
        """Look up one item.

        Args:
            query: what to look up
        """
        return f"Result for {query}: enzalutamide, exemestane and everolimus are listed."

    return execute


def main() -> None:
    num, concurrency = int(sys.argv[2]), int(sys.argv[3])
    samples = [Sample(input=prompt(index)) for index in range(num)]
    task = Task(
        MemoryDataset(samples), solver=[system_message(SYSTEM), use_tools(lookup()), generate()]
    )
    started = time.perf_counter()
    [log] = eval(
        task, model="openai-api/fake/fake", max_connections=concurrency, max_samples=concurrency,
        display="none", log_dir="logs", log_format="eval",
    )  # fmt: skip
    wall_s = round(time.perf_counter() - started, 3)
    succeeded = sum(1 for s in log.samples or [] if not s.error and s.output.completion)
    rss_mb = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    print(
        "@@"
        + json.dumps(
            {"wall_s": wall_s, "rss_mb": rss_mb, "succeeded": succeeded, "lost": num - succeeded}
        )
    )


if __name__ == "__main__":
    main()

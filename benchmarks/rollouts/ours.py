"""One rollout run of ours against an endpoint, or a forecast of one, in a process of its own: ours.py FOLDER BASE_URL JSON-options."""

import json
import resource
import sys
import time
from pathlib import Path

import anyio
import msgspec

from stillroom.api import GenerateRollouts
from stillroom.jobs.reporter import JobReporter
from stillroom.rollout.forecast import Forecast
from stillroom.rollout.results import RolloutsResult
from stillroom.rollout.run import generate_rollouts
from stillroom.run_folder import create_run
from stillroom.settings import Workspace
from stillroom.types import RunKind


def peak_kb(fallback: int) -> int:
    """Returns the most memory of this process; ru_maxrss would count that of the one which started it."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), fallback)


def main() -> None:
    folder, base_url, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    request = GenerateRollouts(
        **{
            "input": "prompts.jsonl",
            "provider": "openai",
            "model": "fake",
            "base_url": base_url,
            "tools": "tools.py",
        }
        | options
    )
    workspace = Workspace(folder)
    run = create_run(workspace, RunKind.ROLLOUTS, {})
    reporter = JobReporter(run, run.read())
    started = time.perf_counter()

    async def work() -> RolloutsResult | Forecast:
        return await generate_rollouts(workspace, request, folder=run.path, reporter=reporter)

    result = anyio.run(work, backend_options={"use_uvloop": True})
    if isinstance(result, Forecast):
        print("@@" + msgspec.json.encode(result).decode())
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print("@@" + json.dumps({
        "wall_s": round(time.perf_counter() - started, 3),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "rss_mb": round(peak_kb(usage.ru_maxrss) / 1024, 1),
        "succeeded": result.succeeded, "failed": result.failed, "omitted": result.omitted, "calls": result.calls,
        "failed_by_class": result.failed_by_class, "cost_usd": result.cost_usd,
    }))  # fmt: skip


if __name__ == "__main__":
    main()

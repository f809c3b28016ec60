"""The machine's clock is set while a run pays for calls: can it still be cancelled? clock_step.py

The real clock is not touched. What the canceller reads of it is shifted instead: the time, and the
time at which it takes a process to have begun, which systems derive from the clock.
"""

import sys
import time
from contextlib import ExitStack
from unittest import mock

import psutil
from scenes import folder_of, look, num_orphans, report, wait_for, wait_for_end, workspace

from fakes.http_endpoint import ScriptedEndpoint
from fakes.projects import endpoint_project, rollouts_request
from fakes.started_runs import asked_long_ago
from fakes.user_files import suspend
from stillroom import api
from stillroom.jobs import supervise

STEPS_S = (3.0, -3.0, 3600.0, -86400.0)


def stepped(shift: float) -> ExitStack:
    """Shifts what this process reads of the clock."""
    stack, now, begun = ExitStack(), time.time, psutil.Process.create_time

    def shifted_now() -> float:
        return now() + shift

    def shifted_start(process: psutil.Process) -> float:
        return begun(process) + shift

    stack.enter_context(mock.patch("time.time", shifted_now))
    stack.enter_context(mock.patch.object(psutil.Process, "create_time", shifted_start))
    return stack


def cancelled(shift: float, *, is_stopped: bool) -> dict:
    """Starts a run that pays, shifts the clock, cancels; `is_stopped`: a run that must be killed."""
    with workspace() as space, ScriptedEndpoint(tool_turns=500, latency_s=0.02) as endpoint:
        endpoint_project(space.root, num_prompts=8)
        request = rollouts_request(
            endpoint,
            output="out.jsonl",
            max_turns=1000,
        )
        run_id = api.generate_rollouts(space, request).run_id
        folder = folder_of(space, run_id)
        wait_for(lambda: endpoint.num_asked > 20)
        with stepped(shift):
            if is_stopped:
                suspend(folder.read().pid)
            supervise.cancel_run(folder)
            asked = time.monotonic()
            if is_stopped:
                asked_long_ago(folder)
                supervise.cancel_run(folder)
            status = wait_for_end(space, run_id, 20).status
            seconds = time.monotonic() - asked
            num_calls = endpoint.num_asked
            time.sleep(0.5)
            later = endpoint.num_asked - num_calls
        return {
            "step_s": shift,
            "killed": is_stopped,
            "status": look(space, run_id).status if status == "cancelled" else status,
            "seconds": round(seconds, 1),
            "calls_after": later,
            "orphans": num_orphans(space.root),
        }


def main() -> int:
    runs = [cancelled(shift, is_stopped=stop) for shift in STEPS_S for stop in (False, True)]
    wrong = [r for r in runs if r["status"] != "cancelled" or r["calls_after"] or r["orphans"]]
    slowest = max(run["seconds"] for run in runs)
    return report(
        "clock",
        f"{len(runs)} paying runs cancelled after the clock was set by {len(STEPS_S)} steps: "
        f"{len(wrong)} went on; the slowest ended after {slowest} s",
        not wrong,
        runs=runs,
    )


if __name__ == "__main__":
    sys.exit(main())

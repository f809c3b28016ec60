"""A server is killed while it trains: does the run go on, and what does the next server say? server_killed.py

A server over standard input starts an SFT run and is killed with SIGKILL. The next server is asked
for the run's state until that is what run.json of the living process shows; then it cancels the run.
"""

import sys
import time
from pathlib import Path

import anyio
from mcp import Client, StdioServerParameters
from scenes import num_orphans, processes_of, report, training_project, wait_for, workspace

ALLOWED_S = 5.0


def server(folder: Path) -> StdioServerParameters:
    arguments = ["-P", "-m", "stillroom_mcp", "serve"]
    return StdioServerParameters(command=sys.executable, args=arguments, cwd=str(folder))


def is_server(process) -> bool:
    return process.cmdline()[-2:] == ["stillroom_mcp", "serve"]


async def start_and_die(folder: Path) -> str:
    """Starts the training through a server, kills that, and returns the run's id."""
    run_id = ""
    try:
        with anyio.fail_after(60):
            async with Client(server(folder)) as client:
                arguments = {"config": "config.yml", "overrides": ["trainer.num_epochs=100000"]}
                run_id = (await client.call_tool("start_training", arguments)).structured_content["run_id"]  # fmt: skip
                for process in processes_of(folder):
                    if is_server(process):
                        process.kill()
                raise ConnectionError
    # The client of a killed server ends in one of several ways.
    except (Exception, BaseExceptionGroup):
        if not run_id:
            raise
    return run_id


async def look_and_cancel(folder: Path, run_id: str) -> tuple[float, int, str]:
    """Returns the seconds until the state was right, the steps made since, and the last status."""
    async with Client(server(folder)) as client:
        started = time.monotonic()

        async def state(tool: str = "get_run", **more) -> dict:
            return (await client.call_tool(tool, {"run_id": run_id, **more})).structured_content

        with anyio.fail_after(60):
            seen = await state()
            while seen["status"] != "running":
                await anyio.sleep(0.05)
                seen = await state()
            right_s = time.monotonic() - started
            first = (seen["progress"] or {"done": 0})["done"]
            while (now := (await state())["progress"] or {"done": 0})["done"] <= first:  # noqa: ASYNC110
                await anyio.sleep(0.1)
            await state("cancel_run")
            ended = await state(wait_s=40)
    return right_s, now["done"] - first, ended["status"]


def main() -> int:
    with workspace() as space:
        training_project(space.root, "sft")
        run_id = anyio.run(start_and_die, space.root)
        folder = space.runs / run_id
        wait_for((folder / "config.json").exists)
        lived = bool(processes_of(space.root))
        right_s, steps, status = anyio.run(look_and_cancel, space.root, run_id)
        orphans = num_orphans(space.root)
    passed = lived and right_s <= ALLOWED_S and steps > 0 and status == "cancelled" and not orphans
    return report(
        7,
        f"the state was right {right_s:.1f} s after the next server's start, training went on, and "
        f"{orphans} processes were left after a cancel",
        passed,
        right_s=round(right_s, 2), steps_since=steps, status=status, orphans=orphans,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

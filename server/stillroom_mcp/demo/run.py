"""Runs the demo: starts the server, runs all stages, prints the results, writes the report."""

import os
import sys
import time
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters
from rich.console import Console

from stillroom import api
from stillroom.errors import InputError
from stillroom.remote.machines import find_machine
from stillroom.settings import Workspace
from stillroom_mcp.demo.chain import (
    ON_POLICY,
    SFT_SOFT,
    SFT_TOKENS,
    DemoSettings,
    Stages,
    run_chain,
)
from stillroom_mcp.demo.guide import (
    DemoStoppedError,
    Guide,
    print_comparisons,
    print_next_commands,
    results_table,
    seconds_table,
)

DEFAULT_FOLDER = "demo-project"
RESULT_ORDER = ("base student", SFT_TOKENS, SFT_SOFT, ON_POLICY, "teacher")


def run_demo(
    folder: str | None, *, seed: int, settings: DemoSettings, where: str | None = None
) -> int:
    """Runs the demo in a new or empty folder and returns the exit code.

    `where` is the machine of machines.yml on which models are trained and evaluated.

    Raises InputError if the folder is not empty, or if there is no such machine.
    """
    folder = folder or free_folder(Path.cwd())
    root = Path(folder).absolute()
    if root.exists() and any(root.iterdir()):
        raise InputError(f"{root} is not empty", "give another folder, or remove this one")
    if where is not None:
        find_machine(Workspace(root), where)
    root.mkdir(parents=True, exist_ok=True)
    return anyio.run(_run_stages, root, folder, seed, settings, where)


def free_folder(parent: Path) -> str:
    """Returns an unused folder name, so that a second demo does not change the first one."""
    names = (f"{DEFAULT_FOLDER}-{number}" for number in count(2))
    return next(name for name in chain([DEFAULT_FOLDER], names) if not (parent / name).exists())


async def _run_stages(
    root: Path, folder: str, seed: int, settings: DemoSettings, where: str | None
) -> int:
    console = Console()
    started = time.monotonic()
    console.print(
        f"Watch it live: {sys.argv[0]} dashboard --workspace {folder} --open", markup=False
    )
    server = StdioServerParameters(
        command=sys.executable,
        # -P: modules in the current folder must not shadow stillroom's.
        args=["-P", "-m", "stillroom_mcp", "serve", "--workspace", str(root)],
        env=dict(os.environ),
    )
    async with Client(server) as client:
        guide = Guide(client, console)
        # Outside the client's block, the error would be wrapped in an ExceptionGroup.
        try:
            stages = await run_chain(guide, settings, seed, where)
            results = await _wait_for_results(stages)
            comparisons = await _compare_stages(stages)
            await _export(guide, results[ON_POLICY]["model"])
        except DemoStoppedError as error:
            console.print(f"\nthe demo stopped: {error}", markup=False)
            return 1
    console.print()
    console.print(results_table({name: results[name] for name in RESULT_ORDER}))
    print_comparisons(console, results, comparisons)
    console.print(seconds_table(guide.seconds, time.monotonic() - started))
    api.write_report(Workspace(root), api.WriteReport())
    print_next_commands(console, folder)
    return 0


async def _wait_for_results(stages: Stages) -> dict[str, dict[str, Any]]:
    guide = stages.guide
    guide.heading(6, "Evaluation", "Waiting for the last evaluation, then comparing all models.")
    runs = {name: await guide.wait(run_id) for name, run_id in stages.evaluated.items()}
    return {name: run["result"] for name, run in runs.items()}


async def _compare_stages(stages: Stages) -> list[dict[str, Any]]:
    """Returns the comparison of each stage with the stage before it.

    Raises DemoStoppedError if a comparison fails.
    """
    guide, ids = stages.guide, stages.evaluated
    comparisons: list[dict[str, Any]] = []
    for before, after in pairwise(("base student", SFT_TOKENS, SFT_SOFT, ON_POLICY)):
        answer = await guide.call(
            "compare_evaluations", baseline=ids[before], candidates=[ids[after]]
        )
        comparisons += answer["comparisons"]
    return comparisons


async def _export(guide: Guide, run_id: str) -> None:
    guide.heading(
        7,
        "Your own model",
        "The student as a folder that transformers and vLLM load. Its card says what it was made "
        "from and how accurate it is.",
    )
    run = await guide.run("export", "export_model", model=run_id, output="exports/clerk")
    exported = run["result"]
    teachers = ", ".join(exported["teachers"])
    guide.say(
        f"    {exported['card']}: base {exported['base_model']}, taught by {teachers}, licence "
        f"{exported['licence']}"
    )

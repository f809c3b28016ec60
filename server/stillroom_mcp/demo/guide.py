"""The demo's guide, which calls the server through an MCP client and prints the progress."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import anyio
from mcp import Client
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_MAX_SHOWN_ARGUMENTS = 5


class DemoStoppedError(Exception):
    """A call or run of the demo failed; the text says which one, and why."""


class Guide:
    """Calls the server's tools through an MCP client, and prints each call and its progress."""

    def __init__(self, client: Client, console: Console) -> None:
        self._client, self._console = client, console
        self.seconds: dict[str, float] = {}
        """The duration of each stage in seconds, by the stage's name."""

    def heading(self, number: int, title: str, text: str) -> None:
        """Prints the number, title and introduction of a step."""
        self._console.print(f"\n[bold]{number}. {escape(title)}[/bold]")
        self.say(text)

    def say(self, text: str) -> None:
        """Prints a text without interpreting markup."""
        self._console.print(escape(text), soft_wrap=True)

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Makes one tool call and returns its structured result."""
        argument_texts = [f"{name}={value}" for name, value in arguments.items()][
            :_MAX_SHOWN_ARGUMENTS
        ]
        more = ", …" if len(arguments) > _MAX_SHOWN_ARGUMENTS else ""
        self._console.print(f"  [cyan]→ {tool}[/cyan]({escape(', '.join(argument_texts))}{more})")
        return await self._call(tool, arguments)

    async def run(self, stage: str, tool: str, **arguments: Any) -> dict[str, Any]:
        """Starts a run, waits until it succeeds, and returns the result of get_run.

        Raises DemoStoppedError if it does not succeed.
        """
        with self.timed(stage):
            return await self.wait(await self.start(tool, **arguments))

    @contextmanager
    def timed(self, stage: str) -> Generator[None]:
        """Records the duration of a stage."""
        started = time.monotonic()
        yield
        self.seconds[stage] = time.monotonic() - started

    async def start(self, tool: str, **arguments: Any) -> str:
        """Starts a run and returns its id, without waiting for it."""
        return (await self.call(tool, **arguments))["run_id"]

    async def wait(self, run_id: str, *, is_shown: bool = True) -> dict[str, Any]:
        """Waits until a run succeeds, and returns the result of get_run.

        is_shown: whether the run's progress is printed.

        Raises DemoStoppedError if it ends in any other way.
        """
        last_done = -1
        while True:
            run = await self._call("get_run", {"run_id": run_id, "wait_s": 10})
            if run["status"] == "succeeded":
                return run
            if run["status"] not in ("starting", "running"):
                raise DemoStoppedError(_failure_text(run))
            progress = run["progress"]
            if is_shown and progress and progress["done"] != last_done:
                last_done = progress["done"]
                self._console.print(f"    {_progress_line(run)}", highlight=False)

    async def _call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        with anyio.fail_after(120):
            result = await self._client.call_tool(tool, arguments)
        if result.is_error or result.structured_content is None:
            text = " ".join(getattr(block, "text", "") for block in result.content)
            raise DemoStoppedError(f"{tool} failed: {text}")
        return result.structured_content


def _progress_line(run: dict[str, Any]) -> str:
    progress, metrics = run["progress"], run["metrics"]
    parts = [f"{progress['phase']}: {progress['done']}/{progress['total']} {progress['unit']}"]
    for name, label in (("loss", "loss"), ("teacher_kl", "KL to teacher"), ("reward", "reward")):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:.3f}")
    if progress["eta_s"]:
        parts.append(f"about {progress['eta_s']:.0f} s left")
    return ", ".join(parts)


def _failure_text(run: dict[str, Any]) -> str:
    error = run["error"] or {"problem": "no reason given", "fix": "read the log of the run"}
    return (
        f"run {run['run_id']} ended with status {run['status']}: {error['problem']}\n"
        f"fix: {error['fix']}\nlog: {run['log_path']}"
    )


LEVELS = ("easy", "medium", "hard")


def results_table(results: dict[str, dict[str, Any]]) -> Table:
    """Returns a table of each model's accuracy and KL to the teacher, with 95 % intervals."""
    table = Table(title="Held-out tasks (95 % intervals)")
    table.add_column("model")
    table.add_column("accuracy", justify="right")
    for level in LEVELS:
        table.add_column(level, justify="right")
    table.add_column("KL per token to teacher", justify="right")
    for name, result in results.items():
        by_level = result["by_group"]["difficulty"]
        kl = result["teacher_kl"]
        table.add_row(
            name,
            _interval(result["accuracy"]),
            *(f"{by_level[level]['value']:.2f}" if level in by_level else "" for level in LEVELS),
            f"{kl['value']:.3f} ± {(kl['high'] - kl['low']) / 2:.3f}" if kl else "–",
        )
    return table


def _interval(estimate: dict[str, Any]) -> str:
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def seconds_table(seconds: dict[str, float], total: float) -> Table:
    """Returns a table of the stages' durations and the total, in seconds."""
    table = Table(title="Seconds per stage (evaluations run at the same time)")
    table.add_column("stage")
    table.add_column("s", justify="right")
    for stage, spent in seconds.items():
        table.add_row(stage, f"{spent:.0f}")
    table.add_row("total", f"{total:.0f}")
    return table


def print_comparisons(
    console: Console, results: dict[str, dict[str, Any]], comparisons: list[dict[str, Any]]
) -> None:
    """Prints the paired differences, and the student's accuracy as a share of the teacher's."""
    for comparison in comparisons:
        difference = comparison["difference"]
        verdict = (
            "" if comparison["is_significant"] else " (may be chance: the interval includes 0)"
        )
        console.print(
            f"{comparison['baseline']} → {comparison['candidate']}: "
            f"{difference['value']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}] on "
            f"the same {comparison['tasks_shared']} tasks{verdict}",
            highlight=False,
        )
    share = results["on-policy"]["accuracy"]["value"] / results["teacher"]["accuracy"]["value"]
    console.print(f"The on-policy student reaches {share:.0%} of the teacher's accuracy.")
    *_, soft_gain, on_policy_gain = comparisons
    if _is_significant_gain(soft_gain):
        console.print(
            "From the same rollouts, the student learns more from the teacher's probabilities than "
            "from its tokens alone. Probabilities require an open teacher with the student's "
            "tokenizer."
        )
    if _is_significant_gain(on_policy_gain):
        console.print(
            "On-policy distillation beats SFT if teacher rollouts are scarce, as here. With many "
            "cheap rollouts, more SFT can be as accurate; an untrained base needs SFT first."
        )
    else:
        console.print(
            "On-policy distillation did not clearly beat SFT in this run; more iterations may help."
        )


def _is_significant_gain(comparison: dict[str, Any]) -> bool:
    return comparison["is_significant"] and comparison["difference"]["value"] > 0


def print_next_commands(console: Console, folder: str) -> None:
    """Prints where the results are, and the commands for your own prompts and teacher."""
    console.print(f"\nEverything is in [bold]{folder}[/bold]; open {folder}/report.html.")
    console.print(
        "With your own prompts and teacher:\n"
        "  stillroom create-project my-project --template starter\n"
        "  edit prompts.jsonl, heldout.jsonl, tools.py and rewards.py in it, then run there:\n"
        "  stillroom check-setup --provider openrouter\n"
        "  stillroom generate-rollouts prompts.jsonl --provider openrouter --model <teacher> "
        "--tools tools.py --n 5\n"
        "Or let a coding agent do it: install the plugin (README.md) and ask it to distil.",
        highlight=False,
        soft_wrap=True,
    )

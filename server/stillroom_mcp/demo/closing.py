"""What the demo prints at its end: the results, what they mean, and what to do next."""

from typing import Any

from rich.console import Console
from rich.table import Table

LEVELS = ("easy", "medium", "hard")


def results_table(results: dict[str, dict[str, Any]]) -> Table:
    """Returns a table of each model's accuracy and KL to the teacher, with 95 % intervals."""
    table = Table(title="Held-out tasks that no stage trained on (95 % intervals)")
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
    table = Table(title="Seconds per stage (evaluations run beside them)")
    table.add_column("stage")
    table.add_column("s", justify="right")
    for stage, spent in seconds.items():
        table.add_row(stage, f"{spent:.0f}")
    table.add_row("everything", f"{total:.0f}")
    return table


def say_what_it_means(
    console: Console, results: dict[str, dict[str, Any]], comparisons: list[dict[str, Any]]
) -> None:
    """Prints the paired differences, and the student's accuracy as a share of the teacher's."""
    for comparison in comparisons:
        difference = comparison["difference"]
        verdict = "" if comparison["is_significant"] else " (the interval holds 0: not shown)"
        console.print(
            f"{comparison['baseline']} → {comparison['candidate']}: "
            f"{difference['value']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}] on "
            f"the same {comparison['tasks_shared']} tasks{verdict}",
            highlight=False,
        )
    share = results["on-policy"]["accuracy"]["value"] / results["teacher"]["accuracy"]["value"]
    console.print(f"The on-policy student reaches {share:.0%} of the teacher's accuracy.")
    *_, to_soft, to_on_policy = comparisons
    if _is_gain(to_soft):
        console.print(
            "The same rollouts teach more by the teacher's probabilities than by its tokens. That "
            "takes an open teacher that cuts text as the student does; any other gives tokens."
        )
    if _is_gain(to_on_policy):
        console.print(
            "On-policy beats SFT where teacher rollouts are scarce, as here. With many cheap ones, "
            "more SFT can be as accurate; from a cold base, do SFT first."
        )
    else:
        console.print(
            "On-policy was not shown to beat SFT in this run; more iterations give it more room."
        )


def _is_gain(comparison: dict[str, Any]) -> bool:
    return comparison["is_significant"] and comparison["difference"]["value"] > 0


def say_next(console: Console, folder: str) -> None:
    """Prints where the results are, and the commands for the user's own prompts and teacher."""
    console.print(f"\nEverything is in [bold]{folder}[/bold]; open {folder}/report.html.")
    console.print(
        "With your own prompts and teacher:\n"
        "  stillroom create-project my-project --template starter\n"
        "  edit prompts.jsonl, heldout.jsonl, tools.py and rewards.py there, then in that folder:\n"
        "  stillroom check-setup --provider openrouter\n"
        "  stillroom generate-rollouts prompts.jsonl --provider openrouter --model <teacher> "
        "--tools tools.py --n 5\n"
        "Or let a coding agent do it: install the plugin (README.md) and ask it to distil.",
        highlight=False,
        soft_wrap=True,
    )

"""What is billed: within a budget, with 30 % faults of every kind, and beside what a dry run had foretold.

The forecast is asked for twice: blind, and after 30 of the 300 rollouts, for the rest. Exits with 1 if a budget is
exceeded, sums do not add up, or what was billed is not between the least and the most that was foretold.
"""

import sys
import tempfile
from pathlib import Path

from common import endpoint, ours, report, write_project

PRICES = '"fake": {input: 20, output: 60}\n'
OPTIONS = {"concurrency": 64, "max_concurrency": 64, "max_tokens": 64}
NUM = 300


def billed_usd(seen: dict) -> float:
    return (20 * seen["prompt_tokens"] + 60 * seen["completion_tokens"]) / 1e6


def project(folder: str, num: int) -> Path:
    write_project(Path(folder), num)
    (Path(folder) / "prices.yml").write_text(PRICES)
    return Path(folder)


def budget(budget_usd: float = 1.0) -> bool:
    with tempfile.TemporaryDirectory() as name, endpoint() as (url, counters):
        done = ours(project(name, 2000), url, budget_usd=budget_usd, **OPTIONS)
        billed = billed_usd(counters())
    report(case="budget", budget_usd=budget_usd, billed_usd=round(billed, 4), **done)
    return billed <= budget_usd


def faults() -> bool:
    settings = ["--faults", "0.1,0.08,0.08,0.04", "--bad-arguments", "0.1"]
    with tempfile.TemporaryDirectory() as name, endpoint(*settings) as (url, counters):
        done = ours(project(name, NUM), url, request_timeout=1.0, **OPTIONS)
        seen = counters()
    faulty = {key: count for key, count in seen.items() if key.startswith("fault_")}
    adds_up = done["succeeded"] + done["failed"] + done["omitted"] == NUM
    num_faulty = sum(count for key, count in faulty.items() if key != "fault_None")
    report(
        case="faults", requested=NUM, adds_up=adds_up, faults=faulty, num_faulty=num_faulty,
        num_replies=sum(faulty.values()), **done,
    )  # fmt: skip
    return adds_up


def forecast(known: int) -> bool:
    """Asks for a dry run after `known` rollouts, then does the rest and compares."""
    with tempfile.TemporaryDirectory() as name, endpoint() as (url, counters):
        folder = project(name, NUM)
        if known:
            ours(folder, url, n=known, **OPTIONS)
        reported = ours(folder, url, dry_run=True, **OPTIONS)
        before = counters()
        ours(folder, url, **OPTIONS)
        after = counters()
    spent = {key: after[key] - before.get(key, 0) for key in ("requests", "prompt_tokens", "completion_tokens")}  # fmt: skip
    actual = {
        "calls": spent["requests"],
        "prompt_tokens": spent["prompt_tokens"],
        "completion_tokens": spent["completion_tokens"],
        "cost_usd": round(billed_usd(spent), 4),
    }
    predicted = {key: reported[key] for key in actual}
    is_within = all(span["low"] <= actual[key] <= span["high"] for key, span in predicted.items())
    report(
        case="forecast", known=known, todo=reported["todo"], is_within=is_within, based_on=reported["based_on"],
        predicted=predicted, actual=actual,
        predicted_over_actual={key: round(span["expected"] / actual[key], 3) for key, span in predicted.items()},
    )  # fmt: skip
    return is_within


if __name__ == "__main__":
    cases = {
        "budget": budget, "faults": faults,
        "blind": lambda: forecast(0), "known": lambda: forecast(30),
    }  # fmt: skip
    chosen = sys.argv[1:] or list(cases)
    sys.exit(0 if all(cases[name]() for name in chosen) else 1)

"""A budget of $1.00 with 64 calls at once, and 30 % faults of every kind: what was billed, and whether sums add up."""

import tempfile
from pathlib import Path

from common import endpoint, ours, report, write_project

PRICES = '"fake": {input: 20, output: 60}\n'


def billed_usd(seen: dict) -> float:
    return (20 * seen["prompt_tokens"] + 60 * seen["completion_tokens"]) / 1e6


def main() -> None:
    options = {"concurrency": 64, "max_concurrency": 64, "max_tokens": 64}
    with tempfile.TemporaryDirectory() as folder, endpoint() as (url, counters):
        write_project(Path(folder), 2000)
        (Path(folder) / "prices.yml").write_text(PRICES)
        done = ours(Path(folder), url, budget_usd=1.0, **options)
        seen = counters()
    report(case="budget", budget_usd=1.0, billed_usd=round(billed_usd(seen), 4), **done)
    faults = ["--faults", "0.1,0.08,0.08,0.04", "--bad-arguments", "0.1"]
    with tempfile.TemporaryDirectory() as folder, endpoint(*faults) as (url, counters):
        write_project(Path(folder), 300)
        done = ours(Path(folder), url, request_timeout=1.0, **options)
        seen = counters()
    faulty = {key: count for key, count in seen.items() if key.startswith("fault_")}
    adds_up = done["succeeded"] + done["failed"] + done["omitted"] == 300
    report(case="faults", requested=300, adds_up=adds_up, faults=faulty, **done)


main()

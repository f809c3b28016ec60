"""How long the dashboard takes to page through 200,000 rollouts, in a real browser. pages.py [--rows 200000]

A dashboard is started as a user starts it. Chromium opens the first, the last and ten other pages of the rollouts, a row, a search and the
distributions; each is timed until it is drawn. On a busy machine the seconds that passed say little, so the processor seconds of the
dashboard for the slowest page are given too. Prints one JSON line and exits with 1 if those of a page are over 2 s, or if the dashboard
held over 200 MB.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, sync_playwright

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS / "thorough"), str(TESTS)]
from size import write_data  # noqa: E402

from fakes.browser import launch_chromium  # noqa: E402

LIMIT_S, LIMIT_MB = 2.0, 200


def measured(page: Page, server: psutil.Process, address: str, drawn: str) -> tuple[float, float]:
    """Returns the seconds until a page is drawn, and the processor seconds of the server."""
    spent, started = sum(server.cpu_times()[:2]), time.perf_counter()
    page.goto(address)
    page.locator(drawn).first.wait_for()
    seconds = time.perf_counter() - started
    return seconds, sum(server.cpu_times()[:2]) - spent


def figures_of(page: Page, server: psutil.Process, base: str, rows: int) -> dict[str, Any]:
    at = f"{base}/rows?path=rollouts.jsonl&row="
    chance = random.Random(1)
    first = measured(page, server, f"{at}1", ".rows-list li")
    others = [rows - 49, *(chance.randrange(1, rows) for _ in range(10))]
    pages = [measured(page, server, f"{at}{row}", ".rows-list li") for row in others]
    started = time.perf_counter()
    page.locator(".rows-list summary").first.click()
    page.locator(".row-body .conversation").first.wait_for()
    row_s = time.perf_counter() - started
    search = measured(page, server, f"{at}1&q=no+such+text+anywhere", ".pager")
    sample = measured(page, server, f"{base}/data/file?path=rollouts.jsonl", ".bars")
    times = {"first_page": first, "search": search, "distributions": sample}
    times["slowest_other_page"] = max(pages, key=lambda one: one[1])
    return {
        **{f"{name}_s": round(seconds, 3) for name, (seconds, _) in times.items()},
        **{f"{name}_cpu_s": round(cpu, 3) for name, (_, cpu) in times.items()},
        "row_s": round(row_s, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, rows, random.Random(0))
        command = [sys.executable, "-P", "-m", "stillroom_mcp", "dashboard", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--workspace", name], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout
            printed = "".join(process.stdout.readline() for _ in range(2))
            entrance = re.search(r"http\S+", printed)[0]
            server = psutil.Process(process.pid)
            with sync_playwright() as playwright:
                page = launch_chromium(playwright).new_page()
                page.goto(entrance)
                figures = figures_of(page, server, entrance.partition("/?")[0], rows)
            held = server.memory_info().rss / 1e6
        finally:
            process.terminate()
            process.wait(10)
        size = (folder / "rollouts.jsonl").stat().st_size / 1e6
    slowest = max(value for name, value in figures.items() if name.endswith("_cpu_s"))
    line = {
        "rows": rows,
        "file_mb": round(size),
        **figures,
        "slowest_cpu_s": slowest,
        "held_mb": round(held),
    }
    drawn = max(
        value for name, value in figures.items() if name.endswith("_s") and "_cpu_" not in name
    )
    line["figure"] = (
        f"{rows:,} rollouts: the slowest page took the dashboard {slowest:.2f} s of a processor and was drawn after {drawn:.1f} s; it held {held:.0f} MB"
    )
    print(json.dumps(line))
    return int(slowest > LIMIT_S or held > LIMIT_MB)


if __name__ == "__main__":
    sys.exit(main())

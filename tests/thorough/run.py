"""Runs what shows each promise of promises.toml, and writes docs/trust.md. run.py [--only 1 8 20] [--full] [--page-only]

A promise is shown by a script, which prints a JSON line, by tests of the suite, or by both. A test may say more than
that it passed, with `record_property("coverage", 0.95)`: numbers, of which the least and the most are shown. The figures are kept in figures.json, so that one promise can be shown again
without the others. Exits with 1 if one is broken.
"""

import argparse
import datetime
import functools
import json
import os
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path
from string import Formatter
from typing import Any

from stillroom import bounds

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FIGURES, PAGE = HERE / "figures.json", ROOT / "docs" / "trust.md"
SCRIPT_LIMIT_S, TESTS_LIMIT_S = 3600, 1800
HEAD = """# Guarantees and their tests

`make trust` runs everything listed here and writes this page; `tests/thorough/run.py --only 8` does so for one guarantee. A figure is
what the script or the tests printed on the date and at the commit in the last column. A guarantee without a figure has not been run.

| | guarantee | tested by | figure | date (commit) |
|---|---|---|---|---|
"""
BOUNDS_HEAD = """
## Limits on input

`engine/stillroom/bounds.py` declares each limit once. A model's own answers, calls and rollouts are limited by the options of a request
(`max_tokens`, `request_timeout`, `tool_timeout`, `rollout_timeout`, `budget_usd`). Tools and file operations run in processes that get at
most half of the machine's memory, or 4 GB if that is more (not enforced on macOS).
In this table, kB, MB and GB are powers of 1024.

| from | what is limited | limit | if exceeded |
|---|---|---|---|
"""
FAULTS_HEAD = """
## Faults that were found and fixed

Each was found by attacking the product, or by users who knew nothing but its skills. Each test failed before the fix.

| fault | tests |
|---|---|
"""


def last_json(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def run_script(promise: dict[str, Any], full: bool) -> tuple[str, bool]:
    """Returns the figure that a script prints, and whether the script says that the promise holds."""
    name, *args = promise["script"].split()
    if full:
        args = promise.get("full", "").split() or args
    command = [sys.executable, str(ROOT / name), *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SCRIPT_LIMIT_S, check=False
    )  # fmt: skip
    shown = last_json(done.stdout)
    names = {name for _, name, _, _ in Formatter().parse(promise.get("figure", "")) if name}
    # A script that broke off may have printed the figures of a part.
    if not shown or not names <= shown.keys():
        return (
            f"no figure: {(done.stderr.strip().splitlines() or ['nothing printed'])[-1][:200]}",
            False,
        )
    figure = promise["figure"].format(**shown) if "figure" in promise else str(shown["figure"])
    return figure, done.returncode == 0 and shown.get("passed", True)


def span(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def run_tests(promise: dict[str, Any]) -> tuple[str, bool]:
    """Returns how many tests passed with what they say beyond that, and whether all did."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "junit_family=xunit1",
            f"--junitxml={record}",
            *(["-m", promise["needs"]] if "needs" in promise else []),
        ]
        subprocess.run(
            [*command, *promise["tests"]], cwd=ROOT, capture_output=True, timeout=TESTS_LIMIT_S, check=False
        )  # fmt: skip
        if not record.exists():
            return "the tests did not run", False
        cases = list(ET.parse(record).iter("testcase"))  # noqa: S314 - pytest wrote it
    bad = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    numbers: dict[str, list[float]] = {}
    for one in (one for case in cases for one in case.iter("property")):
        numbers.setdefault(one.get("name", ""), []).append(float(one.get("value", "nan")))
    said = [f"{name} {span(values)}" for name, values in numbers.items()]
    passed = len(cases) - len(bad) - skipped
    words = [
        f"{passed} test{'' if passed == 1 else 's'} passed",
        *([f"{len(bad)} failed"] if bad else []),
    ]
    words += [f"{skipped} skipped"] if skipped else []
    return "; ".join([*said, ", ".join(words)]), bool(passed) and not bad


def show(promise: dict[str, Any], full: bool) -> dict[str, Any]:
    parts = [run_script(promise, full)] if "script" in promise else []
    parts += [run_tests(promise)] if "tests" in promise else []
    return {
        "figure": "; ".join(figure for figure, _ in parts),
        "passed": all(passed for _, passed in parts),
        "on": f"{datetime.datetime.now(datetime.UTC).date().isoformat()} ({commit()})",
    }


@functools.cache  # The figures themselves are files, which are written in between.
def commit() -> str:
    """Returns the commit that is shown, with a plus sign if files differ from it."""
    words = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def short(test: str) -> str:
    path, _, name = test.partition("::")
    return f"`{Path(path).name}::{name}`" if name else f"`{path.removeprefix('tests/')}`"


def page(table: dict[str, Any], figures: dict[str, Any]) -> str:
    lines = []
    for promise in table["promise"]:
        number = str(promise["number"])
        by = [f"`{promise['script']}`"] if "script" in promise else []
        by += [short(test) for test in promise.get("tests", [])]
        figure = figures.get(number)
        shown = "no figure yet"
        if figure:
            shown = figure["figure"] + ("" if figure["passed"] else " **broken**")
        if "not_covered" in promise:
            shown = f"{shown}; not covered: {promise['not_covered']}"
        cells = [number, promise["text"], "<br>".join(by), shown, figure["on"] if figure else ""]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    faults = [
        f"| {fault['text']} | {'<br>'.join(short(test) for test in fault['tests'])} |"
        for fault in table.get("fault", [])
    ]
    shown = [row for row in vars(bounds).values() if isinstance(row, bounds.Bound)]
    taken = [f"| {row.sender} | {row.subject} | {row.size} | {row.consequence} |" for row in shown]
    parts = [(HEAD, lines), (BOUNDS_HEAD, taken), (FAULTS_HEAD, faults)]
    return "".join(head + "\n".join(rows) + "\n" for head, rows in parts if rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", type=int, help="the numbers of the promises to show")
    parser.add_argument("--full", action="store_true", help="the long form of each script")
    parser.add_argument("--page-only", action="store_true", help="write the page from figures.json")
    options = parser.parse_args()
    table = tomllib.loads((HERE / "promises.toml").read_text())
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for promise in [] if options.page_only else table["promise"]:
        number = promise["number"]
        if (options.only and number not in options.only) or not promise.keys() & {
            "script",
            "tests",
        }:
            continue
        if "needs" in promise and find_spec(promise["needs"]) is None:
            print(
                json.dumps({"promise": number, "not run": f"{promise['needs']} is not installed"})
            )
            continue
        figures[str(number)] = shown = show(promise, options.full)
        print(json.dumps({"promise": number, **shown}), flush=True)
        FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(table, figures))
    return 0 if all(figure["passed"] for figure in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

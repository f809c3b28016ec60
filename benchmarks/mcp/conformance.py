"""MCP's own conformance suites against our server over HTTP. conformance.py [--legs NAME ...] [--offline]

The server is ours, with the tools, resources and tasks that the suites call by name added to it (tests/fakes/conformance). A JSON line
for each leg; exits with 1 if a scenario fails, also one that is not scored, and with 3 if Node or a suite is missing with --offline.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node_tools import FIX, environment, node_folder, program

ROOT = Path(__file__).parents[2]
STABLE, NEXT = (
    "@modelcontextprotocol/conformance@0.1.16",
    "@modelcontextprotocol/conformance@0.2.0-alpha.12",
)
LEGS = {
    "stable": (STABLE, ["--suite", "all"]),
    "2025-11-25": (NEXT, ["--requirements", "2025-11-25"]),
    # With the tasks extension, which the revision does not score.
    "2026-07-28": (NEXT, ["--requirements", "2026-07-28"]),
}
LIMIT_S = 540


@contextmanager
def fixture_server(folder: Path) -> Iterator[str]:
    """Yields the address of our server with the suites' fixtures, at any free port."""
    command = [sys.executable, "-P", "-m", "fakes.conformance", str(folder), "0"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with (
        (folder / "server.log").open("w") as log,
        subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=log, text=True
        ) as server,
    ):
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def run_leg(name: str, url: str, folder: Path, suite: Path, node: Path) -> dict[str, object]:
    """Runs one leg and returns how many checks passed and which scenarios did not."""
    command = [str(suite), "server", "--url", url, *LEGS[name][1], "-o", str(folder / name)]
    done = subprocess.run(
        command, cwd=folder, env=environment(node), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )  # fmt: skip
    summary = done.stdout.partition("=== SUMMARY ===")[2]
    scenarios = re.findall(r"^([✓✗]) ([\w-]+): (\d+) passed, (\d+) failed", summary, re.MULTILINE)
    failing = sorted({name for mark, name, _, _ in scenarios if mark == "✗"})
    failing += re.findall(r"^  ✗ ([\w-]+)", summary, re.MULTILINE)
    return {
        "leg": name,
        "suite": LEGS[name][0],
        "scenarios": len(scenarios),
        "tasks_scenarios": sum(name.startswith("tasks-") for _, name, _, _ in scenarios),
        "checks_passed": sum(int(passed) for _, _, passed, _ in scenarios),
        "failing": sorted(set(failing)),
        "passed": done.returncode == 0 and bool(scenarios) and not failing,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--legs", nargs="+", choices=LEGS, default=list(LEGS))
    parser.add_argument("--offline", action="store_true", help="fetch nothing")
    options = parser.parse_args()
    is_fetching = not options.offline
    node = node_folder(is_fetching=is_fetching)
    suites = {
        leg: program(LEGS[leg][0], "conformance", is_fetching=is_fetching) for leg in options.legs
    }
    if node is None or None in suites.values():
        print(FIX, file=sys.stderr)
        return 3
    results = []
    with tempfile.TemporaryDirectory() as name, fixture_server(Path(name)) as url:
        for leg, suite in suites.items():
            results.append(run_leg(leg, url, Path(name), suite, node))
            print(json.dumps(results[-1]), flush=True)
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

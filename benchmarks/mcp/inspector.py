"""MCP's own inspector against our server, over standard input and output and over HTTP, in both eras. inspector.py [--offline]

Lists (of tools: with --strict, which refuses schemas that are not portable), a call, and a load of 200 calls by 8 at once. A JSON line for
each door and era; exits with 1 if a step fails, and with 3 if Node or the inspector is missing with --offline.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node_tools import FIX, environment, node_folder, program

PACKAGE = "@modelcontextprotocol/inspector@2.12.0"
SERVE = [sys.executable, "-P", "-m", "stillroom_mcp", "serve"]
TOKEN = "the-token-of-this-measurement"  # noqa: S105
CALL = ["--method", "tools/call", "--tool-name", "list_runs", "--tool-args-json", "{}"]
STEPS = {
    "initialize": ["--method", "initialize"],
    "tools": ["--method", "tools/list", "--strict"],
    "resources": ["--method", "resources/list"],
    "templates": ["--method", "resources/templates/list"],
    "prompts": ["--method", "prompts/list"],
    "call": CALL,
    "load": [*CALL, "--load", "--load-requests", "200", "--load-concurrency", "8"],
}
LIMIT_S = 180


@contextmanager
def served(workspace: Path, variables: dict[str, str]) -> Iterator[str]:
    command = [*SERVE, "--http", "--port", "0", "--workspace", str(workspace)]
    process = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield process.stderr.readline().rpartition(" ")[2].strip()
    finally:
        process.terminate()
        process.wait(30)


def inspected(
    inspector: Path, target: list[str], era: str, variables: dict[str, str], folder: Path
) -> dict[str, object]:
    """Returns which steps failed, and what the load came to."""
    failed: dict[str, str] = {}
    load: object = None
    for name, step in STEPS.items():
        command = [
            str(inspector),
            "--cli",
            *target,
            "--protocol-era",
            era,
            "--format",
            "json",
            *step,
        ]
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )  # fmt: skip
        if done.returncode or "Warning" in done.stderr:
            failed[name] = f"exit {done.returncode}: {done.stderr[-300:]}"
        elif name == "load":
            load = json.loads(done.stdout)
    return {"failed": failed, "load": load}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--offline", action="store_true", help="fetch nothing")
    options = parser.parse_args()
    node = node_folder(is_fetching=not options.offline)
    inspector = program(PACKAGE, "mcp-inspector", is_fetching=not options.offline)
    if node is None or inspector is None:
        print(FIX, file=sys.stderr)
        return 3
    code = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = {
            **environment(node),
            "MCP_CATALOG_PATH": str(folder / "catalog"),
            "STILLROOM_TOKEN": TOKEN,
        }
        with served(folder, variables) as url:
            doors = {
                "stdio": [*SERVE, "--workspace", name],
                "http": [url, "--transport", "http", "--header", f"Authorization: Bearer {TOKEN}"],
            }
            for door, target in doors.items():
                for era in ("legacy", "modern"):
                    seen = inspected(inspector, target, era, variables, folder)
                    print(
                        json.dumps(
                            {"door": door, "era": era, "passed": not seen["failed"], **seen}
                        ),
                        flush=True,
                    )
                    code = 1 if seen["failed"] else code
    return code


if __name__ == "__main__":
    sys.exit(main())

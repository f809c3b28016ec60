"""Parents are killed while their children hang: which of these live on after ten seconds? orphans.py

A run whose tool holds the interpreter and has started a process that hides; a server, and a client
that cancels, while a chat template or a regular expression never ends. And a template that asks for
4 GB, which must be refused with little memory taken.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import anyio
import psutil
from mcp import Client, StdioServerParameters
from scenes import folder_of, num_orphans, processes_of, report, wait_for, workspace

from fakes.http_endpoint import ScriptedEndpoint
from fakes.projects import endpoint_project, rollouts_request
from stillroom import api
from stillroom.demo import DEMO_MODELS
from stillroom.errors import EngineError

HOLDING_TOOL = """
import os, subprocess, sys
from stillroom.tools import tool

@tool
def echo(text: str) -> str:
    "Say the text again."
    here = os.path.dirname(__file__)
    program = f"import subprocess as s; s.Popen(['sleep', '600'], start_new_session=True, cwd={here!r})"
    subprocess.run([sys.executable, "-c", program], env={}, cwd="/")
    open(os.path.join(here, f"ready-{os.getpid()}"), "w").close()
    sum(range(10**13))
    return text
"""
ENDLESS_TEMPLATE = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
LARGE_TEMPLATE = "{{ 'a' * 4000000000 }}"
ALLOWED_BYTES = 3_500_000_000


def killed_run() -> int:
    with workspace() as space, ScriptedEndpoint(tool_turns=1) as endpoint:
        endpoint_project(space.root, num_prompts=4)
        (space.root / "tools.py").write_text(HOLDING_TOOL, encoding="utf-8")
        request = rollouts_request(
            endpoint,
            output="out.jsonl",
        )
        run_id = api.generate_rollouts(space, request).run_id
        wait_for(lambda: list(space.root.glob("ready-*")))
        os.kill(folder_of(space, run_id).read().pid, signal.SIGKILL)
        return num_orphans(space.root)


def model_with(folder: Path, template: str) -> None:
    shutil.copytree(next(iter(DEMO_MODELS.values())), folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def rows_of(folder: Path) -> None:
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "a" * 60 + "!"},
    ]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")


CALLS = {
    "template": ("inspect_examples", {"path": "rows.jsonl", "model": "model"}),
    "regex": ("filter_dataset", {"input": "rows.jsonl", "output": "o.jsonl", "contains": "(a+)+$"}),
}


def children(folder: Path) -> list[psutil.Process]:
    """The processes that a server started for a call; they have no file of the folder open."""
    found = []
    for server in processes_of(folder):
        found += server.children()
    return found


def ended_call(call: str, ending: str) -> int:
    """Returns how many processes outlive the server, or a call that its client cancels."""
    with workspace() as space:
        model_with(space.root / "model", ENDLESS_TEMPLATE)
        rows_of(space.root)
        seen: list[psutil.Process] = []

        async def main() -> None:
            command = ["-P", "-m", "stillroom_mcp", "serve"]
            server = StdioServerParameters(command=sys.executable, args=command, cwd=str(space.root))  # fmt: skip
            async with Client(server) as client, anyio.create_task_group() as group:
                group.start_soon(client.call_tool, *CALLS[call])
                with anyio.move_on_after(60):
                    while not any("stillroom.jobs.child" in c.cmdline() for c in children(space.root)):  # noqa: ASYNC110  # fmt: skip
                        await anyio.sleep(0.05)
                await anyio.sleep(2)
                seen.extend(children(space.root))
                if ending == "server killed":
                    for process in processes_of(space.root):
                        process.kill()
                group.cancel_scope.cancel()
                if ending == "cancelled":
                    with anyio.CancelScope(shield=True), anyio.move_on_after(10):
                        while any(child.is_running() for child in seen):  # noqa: ASYNC110
                            await anyio.sleep(0.05)

        try:
            anyio.run(main)
        # The client of a killed server ends in one of several ways.
        except (Exception, BaseExceptionGroup):
            if ending == "cancelled":
                raise
        assert seen, f"{call} started no process"
        wait_for(lambda: not any(child.is_running() for child in seen), 10)
        left = [child for child in seen if child.is_running()]
        for child in left:
            child.kill()
        return len(left)


def large_template() -> tuple[int, bool]:
    """Returns the most memory that the child took, and whether the call was refused with words."""
    with workspace() as space:
        model_with(space.root / "model", LARGE_TEMPLATE)
        rows_of(space.root)
        most, ended = [0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.01):
                for child in psutil.Process().children(recursive=True):
                    try:
                        most[0] = max(most[0], child.memory_info().rss)
                    except psutil.Error:
                        continue

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            request = api.InspectExamples(path="rows.jsonl", model="model")
            page = api.inspect_examples(space, request)
            words = " ".join(str(example.problem) for example in page.examples)
        except EngineError as error:
            words = str(error)
        finally:
            ended.set()
            thread.join(60)
        return most[0], "memory" in words.lower()


def main() -> int:
    started = time.monotonic()
    left = {"run killed": killed_run()}
    for call in CALLS:
        for ending in ("server killed", "cancelled"):
            left[f"{call}, {ending}"] = ended_call(call, ending)
    most, refused = large_template()
    passed = not any(left.values()) and refused and most < ALLOWED_BYTES
    return report(
        "orphans",
        f"{sum(left.values())} processes of {len(left)} killed or cancelled parents lived on after 10 s; a template for 4 GB "
        f"was {'refused' if refused else 'rendered'} with {most / 1e9:.1f} GB taken",
        passed,
        left=left, template_bytes=most, seconds=round(time.monotonic() - started),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

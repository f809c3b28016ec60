"""Has Claude Code work in a scratch project with a scripted endpoint, and keeps its session files.

`PYTHONPATH=scripts python -m trace_samples.make_claude_code CLAUDE`, where CLAUDE is the program
that npm's package `@anthropic-ai/claude-code` brings. The session has parallel tool calls, an
image, a sub-agent and a compaction; another one has a forked sub-agent, and is forked itself. Paths
of the scratch folder and the long lists that Claude Code adds to its calls are cut out of the kept
files.
"""

import base64
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from trace_samples.conversation import IMAGE
from trace_samples.scripted_endpoint import Call, Json, Reply, Script, ScriptedEndpoint
from trace_samples.seen import SAMPLES, anthropic_call, write_seen

_SUB_TASK = "Say what the chair costs."
_SESSION = (
    ("What do a lamp and a chair cost?", "--allowedTools", "Read,Agent"),
    ("/compact", "--continue"),
    ("And both together?", "--continue"),
)
_FORKED_TASK = "Look up the chair alone."
_FORKS = (
    ("What does a lamp cost?",),
    ("And a chair?", "--continue", "--allowedTools", "Agent"),
    ("In dollars?", "--continue", "--fork-session"),
)
_AS_EVENTS = ("--no-session-persistence", "--verbose", "--output-format", "stream-json")
_LISTS = ("skill_listing", "agent_listing_delta", "deferred_tools_delta")


def _script(project: Path) -> Script:
    def reply(_path: str, body: Json) -> Reply:
        messages = body["messages"]
        num_replies = sum(message["role"] == "assistant" for message in messages)
        if not body.get("tools"):
            return Reply(text="Prices")
        if _SUB_TASK in json.dumps(messages[0]):
            return Reply(text="The chair costs 30.", prompt_tokens=11, completion_tokens=3)
        if "TEXT ONLY" in json.dumps(messages[-1]):
            return Reply(text="The lamp costs 12, the chair 30.", prompt_tokens=210)
        if num_replies == 0:
            paths = (str(project / "prices.txt"), str(project / "lamp.png"))
            calls = [
                Call(f"toolu_{number}", "Read", {"file_path": path})
                for number, path in enumerate(paths, start=1)
            ]
            return Reply(
                text="I look at both.",
                reasoning="Two files are needed.",
                calls=tuple(calls),
                prompt_tokens=100,
                cached_tokens=60,
                completion_tokens=9,
            )
        if num_replies == 1:
            task = {
                "description": "chair",
                "prompt": _SUB_TASK,
                "subagent_type": "general-purpose",
            }
            call = Call("toolu_3", "Agent", task)
            return Reply(calls=(call,), prompt_tokens=150, completion_tokens=8)
        if "together" in json.dumps(messages[-4:]):
            return Reply(text="42 €.", prompt_tokens=90, completion_tokens=4)
        return Reply(text="12 and 30.", reasoning="Done.", prompt_tokens=200, completion_tokens=12)

    return reply


def _reply_of_forks(_path: str, body: Json) -> Reply:
    messages = body["messages"]
    if not body.get("tools"):
        return Reply(text="Prices")
    asked = json.dumps(messages[-1])
    if "Directive" in asked or _FORKED_TASK in asked:
        return Reply(text="It costs 30.", prompt_tokens=20, completion_tokens=2)
    if "a chair?" in asked:
        task = {"description": "chair", "prompt": _FORKED_TASK, "subagent_type": "fork"}
        return Reply(text="I ask.", calls=(Call("toolu_1", "Agent", task),), prompt_tokens=15)
    return Reply(text=f"Answer {len(messages)}.", prompt_tokens=10, completion_tokens=3)


def _run(
    program: str, folder: Path, endpoint: ScriptedEndpoint, *words: str, forks: bool = False
) -> str:
    """Runs one turn, and returns what is printed; `forks` lets sub-agents be forked."""
    environment = {
        "HOME": str(folder / "home"),
        "PATH": "/usr/bin:/bin",
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    } | ({"CLAUDE_CODE_FORK_SUBAGENT": "1"} if forks else {})
    return subprocess.run(
        [program, "-p", *words],
        cwd=folder / "project",
        env=environment,
        check=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ).stdout.decode()


def _kept_lines(path: Path, folder: Path) -> str:
    text = path.read_text(encoding="utf-8")
    text = _without_paths(text, folder)
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        attachment = line.get("attachment", {})
        if attachment.get("type") in _LISTS:
            line["attachment"] = {"type": attachment["type"]}
        line.pop("toolUseResult", None)
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    return "".join(f"{encode(line)}\n" for line in lines)


def _without_paths(text: str, folder: Path) -> str:
    for inner in ("project", "home"):
        text = text.replace(str(folder / inner), f"/{inner}")
    text = re.sub(r"/\w+/claude-\d+", "/tasks", text)
    return text.replace(re.sub(r"\W|_", "-", str(folder)), "")


def _write_forks(program: str, sample: Path) -> None:
    """Writes a session, the one of its forked sub-agent, and the one that it was forked to."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        for inner in ("project", "home"):
            (folder / inner).mkdir()
        with ScriptedEndpoint(_reply_of_forks) as endpoint:
            for words in _FORKS:
                _run(program, folder, endpoint, *words, forks=True)
        paths = (folder / "home" / ".claude" / "projects").rglob("*.jsonl")
        for path in paths:
            text = _kept_lines(path, folder)
            name = "agent-fork" if path.name.startswith("agent-") else "original"
            name = "fork" if "In dollars?" in text else name
            (sample / f"{name}.jsonl").write_text(text, encoding="utf-8")
        calls = json.dumps([anthropic_call(seen) for seen in endpoint.seen])
        write_seen(sample / "forks.seen.json", json.loads(_without_paths(calls, folder)))


def main(program: str) -> None:
    """Writes the sessions, and what the endpoint saw of them."""
    sample = SAMPLES / "claude_code"
    (sample / "forks").mkdir(parents=True, exist_ok=True)
    _write_forks(program, sample / "forks")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        for inner in ("project", "home"):
            (folder / inner).mkdir()
        (folder / "project" / "prices.txt").write_text("lamp 12\nchair 30\n", encoding="utf-8")
        (folder / "project" / "lamp.png").write_bytes(base64.b64decode(IMAGE))
        with ScriptedEndpoint(_script(folder / "project")) as endpoint:
            for words in _SESSION:
                _run(program, folder, endpoint, *words)
        with ScriptedEndpoint(_script(folder / "project")) as other:
            printed = _run(program, folder, other, "And both together?", *_AS_EVENTS)
        for path in sorted((folder / "home" / ".claude" / "projects").rglob("*.jsonl")):
            name = "agent-chair.jsonl" if path.name.startswith("agent-") else "session.jsonl"
            (sample / name).write_text(_kept_lines(path, folder), encoding="utf-8")
        (SAMPLES / "claude_code_output").mkdir(exist_ok=True)
        output = SAMPLES / "claude_code_output" / "printed.jsonl"
        output.write_text(_without_paths(printed, folder), encoding="utf-8")
        calls = json.dumps([anthropic_call(seen) for seen in endpoint.seen])
        write_seen(sample / "session.seen.json", json.loads(_without_paths(calls, folder)))


if __name__ == "__main__":
    main(sys.argv[1])

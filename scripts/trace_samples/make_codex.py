"""Has Codex work in a scratch project with a scripted endpoint, and keeps its rollout files.

`PYTHONPATH=scripts python -m trace_samples.make_codex CODEX`, where CODEX is the program that npm's
package `@openai/codex` brings. The thread has an image, parallel tool calls, a second turn and,
as the endpoint counts many tokens, a compaction; another one like it is forked at the end. Paths of
the scratch folder and the long instructions of Codex are cut out of the kept files.
"""

import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trace_samples.conversation import IMAGE, MODEL
from trace_samples.scripted_endpoint import Call, Json, Reply, ScriptedEndpoint
from trace_samples.seen import SAMPLES, responses_call, write_seen

_LIMIT = 5000
_INSTRUCTIONS = "You are a coding agent."
_LONG = re.compile(r"<(skills_instructions|permissions instructions)>.*", re.DOTALL)
_UNREAD = frozenset(
    (
        "world_state",
        "token_usage_record",
        "latest_token_usage_record",
        "internal_chat_message_metadata_passthrough",
        "replacement_history_metadata",
        "retained_context",
        "resume_metadata",
        "thread_settings",
        "rate_limits",
        "turn_attribution",
    )
)


def _script(_path: str, body: Json) -> Reply:
    items = body["input"]
    asked = json.dumps(items[-1])
    if "CHECKPOINT" in asked or "summary" in asked:
        return Reply(text="The lamp costs 12, the chair 30.", prompt_tokens=210)
    if "dollars" in asked:
        return Reply(text="46 $.", prompt_tokens=95, completion_tokens=5)
    if "together" in asked:
        return Reply(text="42 €.", prompt_tokens=90, completion_tokens=4)
    if any(item.get("type") == "function_call_output" for item in items):
        return Reply(text="12 and 30.", prompt_tokens=_LIMIT + 1, completion_tokens=12)
    commands = ("cat prices.txt", "ls")
    return Reply(
        text="I look.",
        reasoning="A file is needed.",
        calls=tuple(
            Call(f"call_{n}", "exec_command", {"cmd": cmd}) for n, cmd in enumerate(commands)
        ),
        prompt_tokens=100,
        cached_tokens=60,
        completion_tokens=9,
    )


def _config(endpoint: ScriptedEndpoint) -> str:
    return f"""model = "{MODEL}"
model_provider = "scripted"
model_auto_compact_token_limit = {_LIMIT}
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.scripted]
name = "scripted"
base_url = "{endpoint.url}/v1"
wire_api = "responses"
"""


def _run(program: str, folder: Path, endpoint: ScriptedEndpoint, *, forks: bool) -> str:
    home = folder / "home"
    (home / "config.toml").write_text(_config(endpoint), encoding="utf-8")
    environment = {"HOME": str(home), "CODEX_HOME": str(home), "PATH": "/usr/bin:/bin"}
    options = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]

    def output_of(*words: str) -> str:
        return subprocess.run(
            [program, "exec", *words],
            cwd=folder / "project",
            env=environment,
            check=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        ).stdout.decode()

    printed = output_of(*options, "-i", "lamp.png", "--", "What do a lamp and a chair cost?")
    thread = json.loads(printed.partition("\n")[0])["thread_id"]
    printed += output_of("resume", thread, *options, "And both together?")
    if forks:
        output_of("fork", *options, thread, "And in dollars?")
    return printed


def _cut(value: Any) -> Any:
    """Returns a value with the long instructions of Codex cut."""
    if isinstance(value, dict):
        return {key: _cut(inner) for key, inner in value.items() if key not in _UNREAD}
    if isinstance(value, list):
        return [_cut(inner) for inner in value]
    if not isinstance(value, str):
        return value
    text = _LONG.sub("Skills.", value)
    return _INSTRUCTIONS if text.startswith("You are a coding agent running in") else text


def _kept(text: str, folder: Path) -> list[Any]:
    text = text.replace(str(folder / "project"), "/project").replace(str(folder), "")
    rows = [_cut(json.loads(line)) for line in text.splitlines()]
    return [row for row in rows if row.get("type") not in _UNREAD]


def _write(path: Path, rows: list[Any]) -> None:
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    path.write_text("".join(f"{encode(row)}\n" for row in rows), encoding="utf-8")


def _write_threads(program: str, sample: Path, *, forks: bool) -> list[Any]:
    """Writes the threads and what the endpoint saw, and returns what Codex printed."""
    sample.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        for inner in ("project", "home"):
            (folder / inner).mkdir()
        (folder / "project" / "prices.txt").write_text("lamp 12\nchair 30\n", encoding="utf-8")
        (folder / "project" / "lamp.png").write_bytes(base64.b64decode(IMAGE))
        with ScriptedEndpoint(_script) as endpoint:
            printed = _run(program, folder, endpoint, forks=forks)
        rollouts = sorted((folder / "home" / "sessions").rglob("rollout-*.jsonl"))
        for name, rollout in zip(("thread", "fork"), rollouts, strict=False):
            rows = _kept(rollout.read_text(encoding="utf-8"), folder)
            _write(sample / f"rollout-{name}.jsonl", rows)
        for call in endpoint.seen:
            (call.body,) = _kept(json.dumps(call.body), folder)
        calls = [responses_call(call) for call in endpoint.seen]
        write_seen(sample / f"{'forks' if forks else 'rollout-thread'}.seen.json", calls)
        return _kept(printed, folder)


def main(program: str) -> None:
    """Writes the threads, what Codex printed of the first, and what the endpoint saw."""
    for name in ("codex", "codex_exec"):
        shutil.rmtree(SAMPLES / name, ignore_errors=True)
    (SAMPLES / "codex_exec").mkdir()
    printed = _write_threads(program, SAMPLES / "codex", forks=False)
    _write(SAMPLES / "codex_exec" / "printed.jsonl", printed)
    _write_threads(program, SAMPLES / "codex" / "forks", forks=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""Writes the samples of `stillroom record`: the official clients' calls, as they passed through it.

`PYTHONPATH=scripts python -m trace_samples.make_recorded`; needs stillroom, openai and anthropic.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai

from trace_samples import clients
from trace_samples.conversation import REPLIES
from trace_samples.scripted_endpoint import ScriptedEndpoint, in_order

SAMPLES = Path(__file__).parents[2] / "tests" / "fixtures" / "traces" / "stillroom_record"
KEY = "sk-of-the-trace-samples"
_MAX_BYTES = 20_000
_LOOPBACK = re.compile(rb"http://127\.0\.0\.1:\d+")


def _recorded(hold: Callable[[str], Any]) -> bytes:
    """Returns the journal of a conversation that goes through the proxy."""
    with (
        ScriptedEndpoint(in_order(REPLIES)) as endpoint,
        tempfile.TemporaryDirectory() as folder,
    ):
        command = ["record", "--upstream", endpoint.url, "--port", "0", "--workspace", folder]
        started = [sys.executable, "-m", "stillroom_mcp", *command]
        with subprocess.Popen(started, stdout=subprocess.PIPE) as process:
            try:
                hold(json.loads(process.stdout.readline() if process.stdout else b"")["recording"])
            finally:
                process.terminate()
        journal = (Path(folder) / "traces" / "calls-0001.jsonl").read_bytes()
    # Neither the port of this machine's endpoint, nor a key.
    journal = _LOOPBACK.sub(b"https://endpoint.example", journal)
    if KEY.encode() in journal:
        raise SystemExit("the key is in the journal")
    return journal


def _openai(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)


def _anthropic(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0)


def main() -> None:
    """Writes one file for each API, whole and streamed."""
    SAMPLES.mkdir(parents=True, exist_ok=True)
    for ending, is_streamed in (("whole", False), ("streamed", True)):
        held: dict[str, Callable[[str], Any]] = {
            "chat": partial(_chat, is_streamed=is_streamed),
            "responses": partial(_responses, is_streamed=is_streamed),
            "messages": partial(_messages, is_streamed=is_streamed),
        }
        for name, hold in held.items():
            lines = _recorded(hold).splitlines(keepends=True)
            # A journal that is full is followed by another one, and samples are small.
            is_long = sum(map(len, lines)) > _MAX_BYTES
            for number, part in enumerate((lines[:2], lines[2:]) if is_long else (lines,)):
                place = SAMPLES / f"{name}_{ending}{f'_{number + 1}' if is_long else ''}.jsonl"
                place.write_bytes(b"".join(part))


def _chat(address: str, *, is_streamed: bool) -> None:
    clients.chat(_openai(address), is_streamed=is_streamed)


def _responses(address: str, *, is_streamed: bool) -> None:
    clients.responses(_openai(address), is_chained=is_streamed, is_streamed=is_streamed)


def _messages(address: str, *, is_streamed: bool) -> None:
    clients.messages(_anthropic(address), is_streamed=is_streamed)


if __name__ == "__main__":
    main()

"""Files of rows that are no rows, or hostile: does the dashboard show each page of them, and nothing of them as HTML? dashboard_rows.py [--cases 300] [--minutes 20]

Rows of all kinds get odd values, texts that would be HTML, and damaged bytes; at times a line has megabytes. Of each file all pages are opened,
some with odd parameters. Each answers 200, or 4xx with words, within seconds; a text of a row is in none of them an element, an attribute or
a script.
"""

import copy
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from fuzz import Fuzzing, arguments, damaged
from scenes import report

from fakes.mutated_logs import mutated
from fakes.odd_lines import MESSAGES, ODD_FIELDS, ROWS, TALK
from fakes.rollout_rows import rollout_row, user
from fakes.trace_files import places_in
from stillroom.processes import end_process

WORKERS, BOUND_S, NUM_FILES = 4, 30.0, 32
ATTACK = "\"'>--></script></pre></title></textarea><owned onload=owned() href=javascript:owned()><script>owned()</script>&lt;"
LONG = 1 << 16
BASES: list[Any] = [
    *ROWS,
    rollout_row(
        messages=TALK, rewards={"a": 1.0}, metadata={"task_type": "t"}, cost_usd=0.1, duration_s=1.0
    ),
    {"prompt": "a", "answer": "b", "task_id": "t"},
    {"prompt": [user("a")], "chosen": [TALK[-1]], "rejected": [TALK[-1]]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, TALK[-1]]},
    *({**ROWS[1], **fields} for fields in ODD_FIELDS),
]
ODD_PARAMETERS = [
    ("row", "0"), ("row", "9" * 18), ("row", "-1"), ("row", "²"), ("at", "1"), ("at", "9" * 17), ("q", ATTACK),
    ("q", "\0"), ("q", "ü"), ("show", ATTACK), ("show", "wrong"), ("number", "7"), ("path", ATTACK), ("path", "../x"),
    ("path", ""), ("path", "\0"), ("path", "a" * 5000),
]  # fmt: skip


class Checker(HTMLParser):
    """Raises AssertionError for what only a row's text could have put into a page."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert tag != "owned", tag
        assert tag != "script" or (values.get("src") or "").startswith("/static/"), attrs
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            is_address = name in ("href", "src", "action", "hx-get")
            assert not is_address or not re.match(r"\s*javascript:", value or "", re.IGNORECASE), (
                value
            )


def lines_of(draw: random.Random) -> bytes:
    """Returns the bytes of a file of rows."""
    rows = copy.deepcopy([draw.choice(BASES) for _ in range(draw.randrange(1, 6))])
    if draw.random() < 0.8:
        rows = mutated(rows, draw)
    for _ in range(draw.randrange(4)):
        holder, key = draw.choice(list(places_in(rows)) or [(rows, 0)])
        hostile = [ATTACK, ATTACK, draw.choice(MESSAGES), "x" * LONG, {ATTACK: ATTACK}, [ATTACK]]
        if rows:
            holder[key] = copy.deepcopy(draw.choice(hostile))
        if isinstance(holder, dict) and draw.random() < 0.3:
            holder[ATTACK] = copy.deepcopy(holder[key])
    lines = [
        json.dumps(row, ensure_ascii=draw.random() < 0.5).encode("utf-8", "replace") for row in rows
    ]
    if draw.random() < 0.02:
        text = ATTACK * draw.randrange(1000, 100_000)
        lines.append(json.dumps(rollout_row(messages=[user(text)])).encode())
    data = draw.choice((b"\n", b"\n", b"\r\n", b"\n\n")).join(lines) + draw.choice((b"\n", b""))
    return damaged(data, draw) if draw.random() < 0.3 else data


def addresses_of(name: str, data: bytes, draw: random.Random) -> Iterator[str]:
    """Yields the pages of a file, and some with a parameter that is odd."""
    starts = [0, *(match.end() for match in re.finditer(b"\n", data))][:8]
    pages: list[tuple[str, dict[str, str]]] = [
        ("/data", {}), ("/data/file", {"path": name}), ("/rows", {"path": name}),
        ("/rows", {"path": name, "show": "failed"}), ("/rows", {"path": name, "q": "owned", "show": "right"}),
        ("/lineage", {"path": name}),
        *(("/row", {"path": name, "at": str(at), "number": "1"}) for at in starts),
    ]  # fmt: skip
    for path, parameters in pages:
        yield f"{path}?{urlencode(parameters)}"
    for path, parameters in draw.sample(pages, 2):
        odd = dict([draw.choice(ODD_PARAMETERS)])
        yield f"{path}?{urlencode({**parameters, **odd})}"


class Dashboard:
    """A dashboard that was started as a user starts it, and a browser with its cookie."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.errors = folder, folder / "errors.txt"
        command = [sys.executable, "-P", "-m", "stillroom_mcp", "dashboard", "--port", "0"]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, "--workspace", str(folder)],
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        assert self.process.stdout
        printed = "".join(self.process.stdout.readline() for _ in range(2))
        entrance = re.search(r"http\S+", printed)
        assert entrance, printed
        self.browser = httpx.Client(base_url=entrance[0].partition("/?")[0], timeout=2 * BOUND_S)
        assert self.browser.get(entrance[0]).status_code == 200

    def check(self, seed: int) -> None:
        """Writes the file of a case and opens its pages."""
        draw = random.Random(seed)
        suffix = ".txt" if draw.random() < 0.1 else ".jsonl"
        name, data = f"case-{seed % NUM_FILES}{suffix}", lines_of(draw)
        (self.folder / name).write_bytes(data)
        for address in addresses_of(name, data, draw):
            began = time.monotonic()
            answer = self.browser.get(
                address, headers={"hx-request": "1"} if draw.random() < 0.2 else {}
            )
            seconds = time.monotonic() - began
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (
                address,
                answer.status_code,
            )
            assert "Traceback" not in answer.text, address
            assert seconds < BOUND_S, (address, seconds)
            if "html" in answer.headers["content-type"]:
                try:
                    Checker().feed(answer.text)
                except AssertionError as error:
                    raise AssertionError(f"{address}: {error}") from error

    def stop(self) -> None:
        self.browser.close()
        end_process(self.process)
        assert self.process.stdout
        self.process.stdout.close()


def main() -> int:
    options = arguments(__doc__, cases=300)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        dashboard = Dashboard(Path(name))
        try:
            dashboard.check(1 << 40)  # what is loaded once is no growth
            fuzzing = Fuzzing(options, dashboard.process.pid)
            fuzzing.check_all(dashboard.check, WORKERS)
            assert fuzzing.growth_bytes >= 0
        finally:
            dashboard.stop()
        errors = dashboard.errors.read_text(encoding="utf-8")
        if "Traceback" in errors:
            fuzzing.note("standard error", AssertionError(errors[-3000:]))
    return report(
        47, fuzzing.sentence("files of rows, of which all pages were opened"), fuzzing.passed, **fuzzing.figures()
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

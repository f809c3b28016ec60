"""Guests of a website, each with a room of its own, played by a scripted teacher in real rollouts.

A guest opens its room, types a word into a form there, and answers with the code it is given for
it. All have their page open before the first goes on.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil

from fakes.chat_endpoint import completion, serve
from fakes.reporters import KeptReporter
from fakes.rollout_rows import read_rows, write_rows
from fakes.websites import Request, Response, open_website
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.results import RolloutsResult
from stillroom.rollout.run import generate_rollouts
from stillroom.settings import Workspace

NUM_GUESTS = 5
NAMES = [f"guest{n:02}" for n in range(NUM_GUESTS)]
UNTOUCHED = ("Cookie: none.", "Stored: nothing and nothing.")

Step = Callable[[str, str], tuple[str, dict[str, Any]]]
"""The next tool call of a guest, from the URL of its room and the last reply it was given."""

PAGE = """<title>{title}</title><main><h1>{title}</h1><p>Cookie: {cookie}.</p><p id=stored></p>
<p>{more}</p></main>
<form action="/answer/{name}"><label>Word <input name=word></label><button>Send</button></form>
<script>
const before = [localStorage.who, sessionStorage.who].map(who => who || 'nothing');
document.getElementById('stored').textContent = 'Stored: ' + before.join(' and ') + '.';
localStorage.who = sessionStorage.who = '{name}';
</script>"""


def code_of(name: str, word: str, cookie: str) -> str:
    """What the site answers to a word; it depends on who it takes the guest for."""
    return hashlib.sha256(f"{name}/{word}/{cookie}".encode()).hexdigest()[:12]


def room(request: Request) -> Response:
    """The website."""
    kind, _, name = request.path.strip("/").partition("/")
    cookie = request.headers.get("cookie", "none")
    if kind not in ("room", "answer"):
        return Response(headers={"Cache-Control": "max-age=999"})
    more = ""
    if kind == "answer":
        more = f"The code is {code_of(name, request.query['word'], cookie)}."
    page = PAGE.format(title=f"{kind} {name}", cookie=cookie, name=name, more=more)
    return Response(page, headers={"Set-Cookie": f"who={name}; Path=/"})


@dataclass
class Stay:
    """What came of it all."""

    result: RolloutsResult
    rows: list[dict[str, Any]]
    requests: list[Request]
    started: set[psutil.Process] = field(default_factory=set[psutil.Process])
    """The processes below this one while all pages were open."""

    def check(self) -> None:
        """Every guest got its own answer, and nothing of another one; no process is left."""
        assert self.result.succeeded == self.result.num_success == NUM_GUESTS, self.result
        assert len(self.rows) == NUM_GUESTS
        for row in self.rows:
            reported = json.dumps(row["messages"])
            name = row["messages"][0]["content"].split()[0]
            assert [other for other in NAMES if other in reported] == [name]
            assert all(words in reported for words in UNTOUCHED), reported
            assert f"Stored: {name} and {name}." in reported, reported
        cookies = [(r.path, r.headers.get("cookie")) for r in self.requests if "guest" in r.path]
        assert sorted(cookies) == sorted(
            visit for n in NAMES for visit in ((f"/room/{n}", None), (f"/answer/{n}", f"who={n}"))
        )
        assert len(self.started) > 1
        assert [p for p in self.started if _runs(p)] == []


class Guests:
    """A scripted teacher: each conversation is one guest's."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._arrived: set[str] = set()
        self._everybody = anyio.Event()
        # Other tests may have left some, e.g. the one that runs are forked from.
        self._before = set(psutil.Process().children(recursive=True))
        self.started: set[psutil.Process] = set()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        messages = json.loads(request.content)["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        name, url = messages[0]["content"].split()
        reply = messages[-1]["content"]
        if turn == 1:
            await self._wait_for_all(name)
        if turn == len(self._steps):
            found = re.search(r"The code is (\w+)", reply)
            return completion(f"Final Answer: {found[1] if found else reply}")
        tool, arguments = self._steps[turn](url, reply)
        function = {"name": tool, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        return completion(None, tool_calls=[call], finish_reason="tool_calls")

    async def _wait_for_all(self, name: str) -> None:
        self._arrived.add(name)
        if len(self._arrived) == NUM_GUESTS:
            self.started |= set(psutil.Process().children(recursive=True)) - self._before
            self._everybody.set()
        await self._everybody.wait()


async def stay(folder: Path, steps: Sequence[Step], **options: Any) -> Stay:
    """Runs the rollouts of all guests at once."""
    guests = Guests(steps)
    async with open_website(room) as site, serve(guests.answer):
        write_rows(
            folder / "prompts.jsonl",
            [
                {
                    "prompt": f"{name} {site.origin}/room/{name}",
                    "metadata": {"expected_answer": code_of(name, "kettle", f"who={name}")},
                }
                for name in NAMES
            ],
        )
        if options.get("browse"):
            options["browse_allow"] = [f"127.0.0.1:{site.port}"]
        result = await generate_rollouts(
            Workspace(folder),
            GenerateRollouts(
                input="prompts.jsonl",
                output="out.jsonl",
                model="m",
                provider="openai",
                base_url="http://teacher.test/v1",
                concurrency=NUM_GUESTS,
                request_timeout=600,
                **options,
            ),
            folder=folder / "run",
            reporter=KeptReporter(),
        )
    assert isinstance(result, RolloutsResult)
    return Stay(result, read_rows(folder / "out.jsonl"), site.requests, guests.started)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False

"""A strong but imperfect teacher of a job, as an OpenAI-compatible endpoint on the loopback.

    teacher.py FOLDER/job [--port 0]

Prints {"base_url": …} once it listens. It answers the last text of the job's world that stands in
the last user message. It labels it, wrongly in 7 % of its answers: half of them whenever it is
asked about that text, half of them by chance. A fifth of the answers are chatty. If it is asked to
reword the text, it answers with another text of the same label. A twentieth of the requests get
429 and 3 % get 500; both cost nothing. GET /billed says what it has billed. All of it follows
from the texts and from how often it was asked about each.
"""

import argparse
import asyncio
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import web
from worlds import World, job_texts, load_world

LIMITED, BROKEN = 0.05, 0.03
MAX_HOURS = 12
"""After which it ends by itself."""
ALWAYS_WRONG, WRONG_BY_CHANCE = 0.035, 0.035
CHATTY = 0.2
CHARS_PER_TOKEN, TOKENS_OF_A_MESSAGE, TOKENS_OF_A_REPLY = 4, 4, 3
REWORD = re.compile(
    r"\b(re-?writ|re-?word|re-?phras|paraphras|in (other|different|new) words)", re.IGNORECASE
)
CHATTY_FORMS = (
    "This looks like **{label}** to me.",
    "Category: {label}.",
    '{label}\n\nThe customer says "{text}", which is about that.',
)


def chance(*parts: object) -> float:
    """Returns a number from 0 to 1 that depends on the parts alone."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class Teacher:
    """What the teacher answers, and what it has billed."""

    def __init__(self, world: World, seed: int, prices: dict[str, float]) -> None:
        self.world = world
        self.counts: Counter[str] = Counter()
        self._prices = prices
        self._labels = {_plain(example.text): example.label for example in job_texts(world, seed)}
        self._patterns = list(world.patterns())
        self._requests: Counter[str] = Counter()

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns the HTTP status and the JSON that answer a request of chat completions."""
        messages = [(message["role"], _content(message)) for message in body["messages"]]
        question = next((content for role, content in reversed(messages) if role == "user"), "")
        text, label = self.find(question)
        self._requests[text] += 1
        number = self._requests[text]
        luck = chance("fault", text, number)
        if luck < LIMITED + BROKEN:
            self.counts["refused"] += 1
            status, reason = (429, "rate limit reached") if luck < LIMITED else (500, "try again")
            return status, {"error": {"message": reason, "type": "error", "code": status}}
        instructions = [content for role, content in messages if role == "system"]
        is_reworded = any(
            REWORD.search(part) for part in (*instructions, question.replace(text, ""))
        )
        answers = [
            self.reworded(text, label, f"{number}.{choice}")
            if is_reworded
            else self.answer(text, label, f"{number}.{choice}")
            for choice in range(body.get("n") or 1)
        ]
        return 200, self._completion(body, messages, answers)

    def find(self, question: str) -> tuple[str, str | None]:
        """Returns the last text of the world in a question, and its label, None if there is none."""
        question = _plain(question)
        known = [
            (question.rfind(text) + len(text), len(text), text)
            for text in self._labels
            if text in question
        ]
        if known:
            text = max(known)[2]
            return text, self._labels[text]
        matches = [
            (match.end(), match[0], label)
            for pattern, label in self._patterns
            for match in pattern.finditer(question)
        ]
        return max(matches)[1:] if matches else (question, None)

    def answer(self, text: str, label: str | None, number: str) -> str:
        """Returns the answer to a text, the right label of which is given."""
        if label is None:
            return "Please show me the text."
        others = [other for other in self.world.labels if other != label]
        if chance("always", text) < ALWAYS_WRONG:
            label = Random(f"always {text}").choice(others)
        elif chance("once", text, number) < WRONG_BY_CHANCE:
            label = Random(f"once {text} {number}").choice(others)
        if chance("chatty", text, number) >= CHATTY:
            return label
        form = Random(f"form {text} {number}").choice(CHATTY_FORMS)
        return form.format(label=label, text=text)

    def reworded(self, text: str, label: str | None, number: str) -> str:
        """Returns another text with the label."""
        if label is None:
            return "Please show me the text."
        return self.world.text("teacher", label, Random(f"reworded {text} {number}"))

    def billed(self) -> dict[str, Any]:
        """Returns the dollars, calls and tokens that have been billed, and what was refused."""
        dollars = (
            self.counts["prompt_tokens"] * self._prices["input_usd_per_million"]
            + self.counts["completion_tokens"] * self._prices["output_usd_per_million"]
        ) / 1e6
        names = ("calls", "prompt_tokens", "completion_tokens", "refused")
        return {"dollars": round(dollars, 6), **{name: self.counts[name] for name in names}}

    def _completion(
        self, body: dict[str, Any], messages: list[tuple[str, str]], answers: list[str]
    ) -> dict[str, Any]:
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 4096
        cut = [answer[: most * CHARS_PER_TOKEN] for answer in answers]
        usage = {
            "prompt_tokens": TOKENS_OF_A_REPLY
            + sum(_num_tokens(content) + TOKENS_OF_A_MESSAGE for _, content in messages),
            "completion_tokens": sum(map(_num_tokens, cut)),
        }
        self.counts.update({"calls": 1, **usage})
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop" if text == answer else "length",
            }
            for index, (text, answer) in enumerate(zip(cut, answers, strict=True))
        ]
        return {
            "id": f"chatcmpl-{self.counts['calls']}",
            "object": "chat.completion",
            "created": 0,
            "model": body.get("model", ""),
            "choices": choices,
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return (
        content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
    )


def _plain(text: str) -> str:
    return " ".join(text.split())


def _num_tokens(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)


def load_teacher(job: Path) -> Teacher:
    """Returns the teacher of a job that worlds.py has written."""
    origin = json.loads((job.resolve().parent / "hidden" / "world.json").read_bytes())
    prices = json.loads((job / "job.json").read_bytes())["prices"]
    return Teacher(load_world(origin["world"]), origin["seed"], prices)


def application(teacher: Teacher) -> web.Application:
    """Returns the endpoint of a teacher."""

    async def complete(request: web.Request) -> web.Response:
        status, answer = teacher.reply(await request.json())
        headers = {"Retry-After": "1"} if status == 429 else {}
        return web.json_response(answer, status=status, headers=headers)

    async def billed(_request: web.Request) -> web.Response:
        return web.json_response(teacher.billed())

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "teacher", "object": "model"}]})

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/billed", billed)
    return app


async def serve(teacher: Teacher, port: int) -> None:
    """Serves the teacher until the process ends, at most for MAX_HOURS."""
    runner = web.AppRunner(application(teacher))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(json.dumps({"base_url": f"http://127.0.0.1:{runner.addresses[0][1]}/v1"}), flush=True)
    await asyncio.sleep(MAX_HOURS * 3600)


def main() -> None:
    """Serves the teacher of a job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", type=Path)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    asyncio.run(serve(load_teacher(options.job), options.port))


if __name__ == "__main__":
    main()

"""A job for a recipe: name the colour of a thing, which a teacher on the loopback knows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fakes.loopback import LoopbackHandler, LoopbackServer
from stillroom.settings import Workspace

COLOURS = {"rose": "red", "sky": "blue", "leaf": "green"}


def colour_of(text: str) -> str:
    return next(colour for thing, colour in COLOURS.items() if thing in text)


class ColourTeacher(LoopbackServer):
    """Knows the colour of each thing, or always says what it is given; counts its calls."""

    @property
    def num_calls(self) -> int:
        return self.asked.total() + self.reworded.total()

    def __init__(self, always: str | None = None) -> None:
        self.always = always
        self.asked, self.reworded = Counter[str](), Counter[str]()
        super().__init__(_Handler)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        text = body["messages"][-1]["content"]
        is_reworded = "Rewrite" in body["messages"][0]["content"]
        (self.reworded if is_reworded else self.asked)[text] += 1
        said = self.reword(text) if is_reworded else self.always or self.says(text)
        return {
            "choices": [
                {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            ],
            "usage": {"prompt_tokens": 20, "completion_tokens": 5},
        }

    def reword(self, text: str) -> str:
        """Returns a question in other words."""
        return f"Tell me: {text}"

    def says(self, text: str) -> str:
        """Returns the answer to a question."""
        return f"It is **{colour_of(text)}**."


class JsonTeacher(ColourTeacher):
    """Gives colour and number as an object in a chatty text; of 7, 17, … the number is wrong, and
    of 9, 39, … the colour."""

    def says(self, text: str) -> str:
        number = int(number_in(text))
        colour = "blue" if number % 30 == 9 else colour_of(text)
        said = {"number": 500 if number % 10 == 7 else number, "colour": colour}
        return f"Here you are:\n```json\n{json.dumps(said, indent=2)}\n```"


class LineTeacher(ColourTeacher):
    """Gives colour and number as one line in a chatty text; of 7, 17, … the number is wrong, and
    of 9, 39, … the colour."""

    def says(self, text: str) -> str:
        number = int(number_in(text))
        colour = "blue" if number % 30 == 9 else colour_of(text)
        said = f"colour={colour} number={500 if number % 10 == 7 else number}"
        return f"Sure! I looked that up: {said}. Anything else?"


def number_in(text: str) -> str:
    return text.removesuffix("?").split()[-1]


class _Handler(LoopbackHandler):
    owner: ColourTeacher

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        self.send_body(200, json.dumps(self.owner.answer(self.read_body())).encode())


def things(start: int, count: int) -> list[str]:
    names = list(COLOURS)
    return [f"What colour has {names[n % 3]} number {n}?" for n in range(start, start + count)]


def make_data(folder: Path, *, num_inputs: int = 40, num_labelled: int = 24) -> Workspace:
    rows = "".join(f"{text}\n" for text in things(0, num_inputs))
    (folder / "inputs.csv").write_text(f"text\n{rows}", encoding="utf-8")
    labelled = things(1000, num_labelled)
    rows = "".join(f"{text},{colour_of(text)}\n" for text in labelled)
    (folder / "labelled.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    (folder / "prices.yml").write_text("t: {input: 1, output: 1}\n", encoding="utf-8")
    return Workspace(folder)


def logged_call(text: str, answer: str) -> dict[str, Any]:
    """A row of an API log, with what a model answered to a text."""
    messages = [
        {"role": "system", "content": "Name the colour."},
        {"role": "user", "content": text},
    ]
    choice = {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
    return {
        "request": {"model": "gpt-5", "messages": messages},
        "response": {"model": "gpt-5", "choices": [choice]},
    }

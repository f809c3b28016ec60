"""A request is carried out with seven tools over several turns."""

from random import Random
from typing import Any

from task import Call, Row, Task

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
NAMES = ("Mara", "Jonas", "Aiko", "Pavel", "Lucia", "Omar", "Greta", "Tomas", "Ines", "Viktor")
ROOMS = ("Oak", "Birch", "Cedar")
CITIES = ("Lyon", "Turin", "Graz", "Ghent", "Porto")
OFFICE_TOOLS = '''"""The office: all that the tools know follows from their arguments."""

from hashlib import sha256

from stillroom.tools import tool


def number(*parts: object, below: int) -> int:
    """Returns a number that follows from the parts."""
    return int(sha256(repr(parts).encode()).hexdigest()[:8], 16) % below


@tool
def find_person(name: str) -> str:
    """The number of a person."""
    return f"p{100 + number('person', name, below=900)}"


@tool
def free_hour(person: str, day: str) -> str:
    """The first free hour of a person (by number) on a day."""
    return str(9 + number("free", person, day, below=9))


@tool
def book_meeting(person: str, day: str, hour: int) -> str:
    """Book a meeting with a person (by number)."""
    return f"m{100 + number('meeting', person, day, hour, below=900)}"


@tool
def cancel_meetings(person: str, day: str) -> str:
    """Cancel the meetings with a person (by number) on a day; how many there were."""
    return str(1 + number("cancel", person, day, below=4))


@tool
def find_room(day: str, hour: int) -> str:
    """A room that is free then."""
    return ("Oak", "Birch", "Cedar")[number("room", day, hour, below=3)]


@tool
def weather(city: str, day: str) -> str:
    """The weather in a city on a day."""
    return ("sun", "rain", "snow", "wind")[number("weather", city, day, below=4)]


@tool
def send_note(person: str, text: str) -> str:
    """Send a note to a person (by number)."""
    return f"n{100 + number('note', person, text, below=900)}"
'''
OFFICE_SYSTEM = "You are an office assistant. Use the tools, then answer in a few words."
_tools: dict[str, Any] = {}
exec(OFFICE_TOOLS, _tools)  # noqa: S102 - the text above


def called(tool: str, **arguments: Any) -> Call:
    """Returns a call with the reply of the tool."""
    return Call(tool, arguments, _tools[tool](**arguments))


def plan_booking(name: str, day: str, city: str) -> tuple[list[Call], str]:
    person = called("find_person", name=name)
    hour = called("free_hour", person=person.reply, day=day)
    book = called("book_meeting", person=person.reply, day=day, hour=int(hour.reply))
    return [person, hour, book], f"Booked {book.reply}: {day} at {hour.reply} with {name}."


def plan_cancelling(name: str, day: str, city: str) -> tuple[list[Call], str]:
    person = called("find_person", name=name)
    cancel = called("cancel_meetings", person=person.reply, day=day)
    return [person, cancel], f"Cancelled {cancel.reply} with {name} on {day}."


def plan_room(name: str, day: str, city: str) -> tuple[list[Call], str]:
    person = called("find_person", name=name)
    hour = called("free_hour", person=person.reply, day=day)
    room = called("find_room", day=day, hour=int(hour.reply))
    return [person, hour, room], f"{room.reply} is free on {day} at {hour.reply}."


def plan_weather_note(name: str, day: str, city: str) -> tuple[list[Call], str]:
    forecast = called("weather", city=city, day=day)
    person = called("find_person", name=name)
    text = f"{city} on {day}: {forecast.reply}"
    note = called("send_note", person=person.reply, text=text)
    return [forecast, person, note], f"Sent {note.reply} to {name}: {text}."


OFFICE = (
    (
        plan_booking,
        (
            "Book a meeting with {name} on {day}.",
            "Find the first free hour of {name} on {day} and take it.",
            "I need to see {name} on {day}, please arrange it.",
        ),
        (
            "Get me some time with {name}, {day} if you can.",
            "{day} would be good to talk to {name}: put it in the calendar.",
        ),
    ),
    (
        plan_cancelling,
        (
            "Cancel everything with {name} on {day}.",
            "I cannot meet {name} on {day}, call it off.",
            "Clear my {day} of meetings with {name}.",
        ),
        (
            "{day} with {name} is not going to work, drop it.",
            "Take {name} off my calendar for {day}.",
        ),
    ),
    (
        plan_room,
        (
            "Which room is free when {name} first has time on {day}?",
            "Find a room for the first free hour of {name} on {day}.",
            "Where can I meet {name} on {day} at their first free hour?",
        ),
        (
            "{name} and I need a place on {day}, as early as {name} can.",
            "As soon as {name} is free on {day}: which room do we get?",
        ),
    ),
    (
        plan_weather_note,
        (
            "Send {name} a note with the weather in {city} on {day}.",
            "Let {name} know how the weather in {city} will be on {day}.",
            "Write to {name} what the weather in {city} is on {day}.",
        ),
        (
            "{name} travels to {city} on {day} and asks about the weather: send a note.",
            "Drop {name} a line on the {day} weather for {city}.",
        ),
    ),
)


def make_errand(rng: Random, is_new: bool) -> Row:
    """Makes a request to the office, with the calls and the answer that carry it out."""
    plan, *forms = rng.choice(OFFICE)
    fillings = {"name": rng.choice(NAMES), "day": rng.choice(DAYS), "city": rng.choice(CITIES)}
    calls, answer = plan(**fillings)
    prompt = rng.choice(forms[is_new]).format(**fillings)
    return {"prompt": prompt, "answer": answer, "calls": calls, "group": plan.__name__}


OFFICE_TASK = Task(
    "office", make_errand, OFFICE_SYSTEM, max_tokens=64, tools=OFFICE_TOOLS, max_turns=5
)

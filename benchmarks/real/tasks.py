"""A task for a small real student, made from a grammar whose test forms it never sees.

`tickets`: a support ticket becomes one strict line with its queue, urgency and order number. There
are forms for training and other forms for testing: held-out tasks are of the training forms with
new fillings (`seen`), or of forms of which no training row has any (`new`).
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Task:
    """A task, and how its rows are made."""

    name: str
    make_row: Callable[[Random, bool], Row]
    """Makes a row from a training form, or from a new form if True."""
    system: str
    max_tokens: int

    def rows(self, seed: int, count: int, *, is_new: bool) -> list[Row]:
        """Returns `count` rows with different prompts."""
        rng = Random(f"{self.name} {seed} {is_new}")
        rows: dict[str, Row] = {}
        for _ in range(200 * count):
            row = self.make_row(rng, is_new)
            rows.setdefault(row["prompt"], row)
            if len(rows) == count:
                return list(rows.values())
        raise RuntimeError(f"{self.name}: the grammar has fewer than {count} different prompts")


TICKETS = {
    "billing": (
        (
            "I was charged twice for {order}.",
            "The invoice for {order} has the wrong amount on it.",
            "My card was billed {amount} euros for {order}, which I never agreed to.",
            "Please correct the VAT on the bill of {order}.",
        ),
        (
            "There are two payments of {amount} euros on my statement for {order}.",
            "You took more money than the {amount} euros shown for {order}.",
        ),
    ),
    "delivery": (
        (
            "{order} has not arrived yet.",
            "The parcel with {order} was left in the rain.",
            "Tracking for {order} has not moved for {days} days.",
            "The courier says {order} was delivered, but nothing is here.",
        ),
        (
            "I am still waiting for the package of {order}.",
            "It is {days} days late: where is {order}?",
        ),
    ),
    "returns": (
        (
            "I want to send back {order}.",
            "How do I return the {item} from {order}?",
            "The {item} in {order} does not fit, I would like my money back.",
            "Please mail me a return label for {order}.",
        ),
        (
            "The {item} is not for me; can you take {order} back?",
            "I would like to swap the {item} of {order} for a smaller one.",
        ),
    ),
    "technical": (
        (
            "The {item} from {order} does not switch on.",
            "The app cannot find the {item} that came with {order}.",
            "After the update the {item} from {order} keeps restarting.",
            "The {item} of {order} shows error {days}.",
        ),
        (
            "My new {item} ({order}) freezes every {days} minutes.",
            "Nothing happens when I press the button of the {item} from {order}.",
        ),
    ),
    "account": (
        (
            "I cannot log in to see {order}.",
            "Please change the email address of the account behind {order}.",
            "The password reset for the account with {order} never arrives.",
            "Close my account once {order} is done.",
        ),
        (
            "Somebody else can see {order} in their profile.",
            "Your site no longer accepts my password, and I need {order}.",
        ),
    ),
    "sales": (
        (
            "Do you give a discount if I order {days} more like {order}?",
            "Is the {item} from {order} available in blue?",
            "Can I add a second {item} to {order}?",
            "We would like a quote for {days} pieces of the {item} in {order}.",
        ),
        (
            "What would {days} more of the {item} from {order} cost?",
            "Do you also sell a larger {item} than the one in {order}?",
        ),
    ),
}
ITEMS = ("lamp", "kettle", "router", "speaker", "drill", "printer", "camera", "heater", "scale")
URGENCY = {
    "high": (
        ("I need this solved today.", "This is urgent.", "We are losing money every hour."),
        ("It cannot wait until tomorrow.", "Please treat it as an emergency."),
    ),
    "normal": (
        ("Please let me know this week.", "Thanks for looking into it.", ""),
        ("I would be glad to hear from you soon.", "Have a nice day."),
    ),
    "low": (
        ("There is no hurry.", "Whenever you find the time.", "It is not important."),
        ("Take as long as you want.", "Next month is fine as well."),
    ),
}
GREETINGS = ("Hello,", "Hi there,", "Good morning,", "Dear team,", "")
TICKET_SYSTEM = (
    "Sort the ticket. Answer with one line: queue=<billing|delivery|returns|technical|account|"
    "sales> urgency=<high|normal|low> order=<number>"
)


def make_ticket(rng: Random, is_new: bool) -> Row:
    """Makes a ticket and the line that sorts it."""
    queue, urgency = rng.choice(list(TICKETS)), rng.choice(list(URGENCY))
    order = f"{rng.choice('ABCDEFGH')}{rng.randint(1000, 9999)}"
    fillings = {
        "order": f"order {order}",
        "amount": rng.randint(12, 480),
        "days": rng.randint(3, 40),
        "item": rng.choice(ITEMS),
    }
    complaint = rng.choice(TICKETS[queue][is_new]).format(**fillings)
    parts = [rng.choice(GREETINGS), complaint, rng.choice(URGENCY[urgency][is_new])]
    text = " ".join(part for part in parts if part)
    answer = f"queue={queue} urgency={urgency} order={order}"
    return {"prompt": text[:1].upper() + text[1:], "answer": answer, "group": queue}


TASKS = {"tickets": Task("tickets", make_ticket, TICKET_SYSTEM, max_tokens=40)}


def prompt_row(task: Task, row: Row) -> Row:
    """Returns the row as a prompt with its expected answer."""
    metadata = {"expected_answer": row["answer"], "answer_match": "exact", "group": row["group"]}
    return {"messages": _prompt(task, row), "metadata": metadata}


def gold_row(task: Task, row: Row) -> Row:
    """Returns the row as a conversation to train on."""
    return {"messages": [*_prompt(task, row), {"role": "assistant", "content": row["answer"]}]}


def _prompt(task: Task, row: Row) -> list[Row]:
    return [{"role": "system", "content": task.system}, {"role": "user", "content": row["prompt"]}]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

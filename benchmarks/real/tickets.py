"""A support ticket becomes one strict line with its queue, urgency and order number."""

from random import Random

from task import Row, Task

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


TICKETS_TASK = Task("tickets", make_ticket, TICKET_SYSTEM, max_tokens=40)

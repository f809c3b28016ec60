"""App reviews with one subject each, between sentences that are about something else."""

from random import Random

SUBJECTS = {
    "praise": (
        "Honestly the best {kind} app I have ever had on my {device}.",
        "Five stars from me, the {feature} is a joy to use.",
        "My {person} recommended it and now I cannot imagine a day without it.",
        "Whoever designed the {feature} deserves a raise.",
        "Simple, quick and pretty, exactly what a {kind} app should be.",
    ),
    "crash": (
        "It closes by itself as soon as I open the {feature}.",
        "Since version {version} the screen goes black after {number} seconds.",
        "Whenever I tap on the {feature} everything freezes and I have to restart my {device}.",
        "It crashed {number} times in one evening and I lost all of my notes.",
        "All I get on my {device} is a white page and then the home screen.",
    ),
    "price": (
        "{number} euros a month is far too much for a {kind} app.",
        "The {feature} used to be free and now they want a subscription for it.",
        "I was charged for a second year although I had cancelled in {month}.",
        "For what it does the yearly plan is a rip-off, the other {kind} apps cost half of that.",
        "They put the {feature} behind a paywall.",
    ),
    "feature request": (
        "Please add a dark mode to the {feature}.",
        "It would be great if the {feature} could be exported as a spreadsheet.",
        "I wish there was a way to share the {feature} with my {person}.",
        "What is missing is a widget for the {device}.",
        "Could you bring the {feature} to the watch as well?",
    ),
    "login": (
        "It does not accept my password any more.",
        "The code that should come by text message never arrives, so I am locked out.",
        "After I changed my {device} I cannot get into my account.",
        "Signing in with my mail address sends me back to the start page each time.",
        "I have to enter my name and password {number} times a day.",
    ),
    "shipping": (
        "I ordered the printed {feature} in {month} and nothing has been sent yet.",
        "The parcel with my {kind} book went to the wrong street.",
        "Delivery took {number} days although it said next day.",
        "The box was torn open when the postman brought it.",
        "It has been at the depot for {number} days according to the tracking page.",
    ),
    "privacy": (
        "Why does a {kind} app want to know where I am?",
        "I found out that it uploads all of my contacts.",
        "I asked them to delete my data in {month} and they never did.",
        "It listens to the microphone although I turned that off on my {device}.",
        "The {feature} shows my name to complete strangers.",
    ),
}
ASIDES = (
    "I have been using this for {number} months now.",
    "My {person} uses it too.",
    "I have a {device}.",
    "I write this on my way to work.",
    "First review I have ever written, by the way.",
    "I paid for the yearly plan last {month}.",
    "I like the {feature} a lot.",
    "The {feature} is fine, I suppose.",
    "The weather has been awful here since {month}.",
    "My old {device} was from another brand.",
    "I mostly look at it in the evening.",
    "We are a family of {number}.",
    "I got the app after reading about it in a magazine.",
    "My {person} says I should be more patient.",
    "I do not use the {feature} that much.",
    "It is raining and I have time to write this.",
    "I am no expert in such things.",
    "I also have two other {kind} apps.",
    "The update in {month} changed the colours.",
    "I have an account since {month}.",
    "They answered my mail within {number} days, which was nice.",
    "Anyway, that is my opinion.",
    "Maybe others have seen the same.",
    "I hope somebody reads this.",
    "Greetings from the seaside!",
)
FILLINGS = {
    "kind": ("recipe", "fitness", "photo", "budget", "diary", "travel", "music", "gardening"),
    "device": ("tablet", "old phone", "Pixel", "Galaxy", "laptop", "new phone", "work phone"),
    "feature": (
        "calendar", "photo album", "shopping list", "weekly report", "map", "timer", "planner",
        "gallery", "statistics page", "notebook", "search", "chat", "training log", "archive",
    ),
    "person": ("sister", "boss", "neighbour", "daughter", "husband", "wife", "colleague", "uncle"),
    "month": ("January", "March", "April", "June", "August", "October", "November"),
}  # fmt: skip


def make_review(rng: Random) -> tuple[str, str]:
    """Makes a review, and returns it with its subject."""
    subject = rng.choice(list(SUBJECTS))
    sentences = rng.sample(ASIDES, rng.randint(1, 4))
    sentences.insert(rng.randint(0, len(sentences)), rng.choice(SUBJECTS[subject]))
    fillings = {name: rng.choice(values) for name, values in FILLINGS.items()}
    fillings["number"] = str(rng.randint(2, 40))
    fillings["version"] = f"{rng.randint(2, 9)}.{rng.randint(0, 20)}"
    return " ".join(sentences).format(**fillings), subject

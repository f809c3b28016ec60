"""Tasks of classification sets that were made from templates: one line each, of at most 12 words.

Two tasks of a set differ in a word or two, and are different tasks all the same.
"""

import itertools
import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PRODUCTS = _words(
    "lamp kettle heater camera speaker toaster router fan printer blender scale "
    "monitor drill doorbell thermostat vacuum"
)
PROBLEMS = (
    "my card was declined when paying for the {}",
    "the app crashes when I pair the {}",
    "where is the parcel with my {}",
    "I was charged twice for the {}",
    "the {} arrived with a broken cable",
    "how do I reset the {}",
    "I want to send back the {}",
    "can I still change the colour of my {}",
    "the manual of the {} is missing",
    "does the {} work with solar power",
    "my {} makes a loud noise",
    "when will the {} be back in stock",
    "I cannot find the invoice for my {}",
    "is there a discount on two {}s",
    "the wrong {} was in the box",
    "how long is the warranty of the {}",
)
HURRY = ("", "no hurry", "please help quickly", "thanks a lot", "this is urgent")

DISHES = _words("soup pasta curry salad burger ramen risotto steak pizza tacos")
PLACES = _words("Luna Bistro Harbour Garden Corner Station Bridge Mill Castle Plaza")
OPINIONS = _words("great bland superb cold overpriced perfect salty stale lovely average")
SERVICES = ("slow", "friendly", "rude", "quick", "absent")

DEVICES = _words("lights blinds oven radio alarm fan boiler tap door camera")
ROOMS = _words("kitchen bedroom hall garage office bathroom attic cellar garden nursery")
TIMES = ("", "now", "at seven", "tonight", "every morning")
ORDERS = ("turn on", "turn off", "check", "schedule")


def tasks(name: str) -> list[str]:
    """Returns all tasks of a set: support, reviews or commands."""
    match name:
        case "support":
            made = (f"{p.format(thing)}. {h}" for p, thing, h in
                    itertools.product(PROBLEMS, PRODUCTS, HURRY))  # fmt: skip
        case "reviews":
            made = (f"The {dish} at {place} was {opinion} and the service {service}"
                    for dish, place, opinion, service in
                    itertools.product(DISHES, PLACES, OPINIONS, SERVICES))  # fmt: skip
        case _:
            made = (f"{order} the {device} in the {room} {time}" for order, device, room, time in
                    itertools.product(ORDERS, DEVICES, ROOMS, TIMES))  # fmt: skip
    return [task.strip(". ").strip() for task in made]


SETS = ("support", "reviews", "commands")
WRAPPERS = (
    "Classify this message: {}",
    "{}\nAnswer with one word.",
    "Please read: {}. What is it?",
)


def split(name: str, chance: random.Random, *, held_out: int, rows: int) -> tuple[list[str], ...]:
    """Returns held-out tasks, and other tasks of the set of which none has all of their words."""
    every = tasks(name)
    chance.shuffle(every)
    held = every[:held_out]
    joined = [f" {' '.join(task.lower().replace('.', '').split())} " for task in held]
    free = [
        task
        for task in every[held_out:]
        if not any(h in f" {' '.join(task.lower().replace('.', '').split())} " for h in joined)
    ]
    return held, free[:rows]

"""Looks up the price of a model's tokens, in a built-in table and in the workspace's prices.yml."""

import re
from dataclasses import dataclass
from typing import Any

import yaml

from stillroom.errors import DocumentError, InputError
from stillroom.secrecy.readable import check_readable, unreadable
from stillroom.settings import Workspace
from stillroom.types import Usage
from stillroom.yaml_text import read_yaml

PRICES_AS_OF = "2025-12"
"""The month in which the table below was compiled; prices.yml in the workspace overrides it."""
PRICES_FILE = "prices.yml"
MACHINE = "machine"
"""The line of prices.yml with the price of this machine: `machine: {usd_per_hour: 1.2}`."""
_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """A model's prices for prompt and completion tokens, in US dollars per million tokens."""

    prompt: float
    completion: float

    def of(self, usage: Usage) -> float:
        """Returns the price of a call with this usage, in US dollars."""
        total = self.prompt * usage.prompt_tokens + self.completion * usage.completion_tokens
        return total / _MILLION


FREE = Price(0.0, 0.0)

_LISTED: dict[str, Price] = {
    "gpt-4o": Price(2.5, 10),
    "gpt-4o-2024-05-13": Price(5, 15),
    "gpt-4o-mini": Price(0.15, 0.6),
    "gpt-4.1": Price(2, 8),
    "gpt-4.1-mini": Price(0.4, 1.6),
    "gpt-4.1-nano": Price(0.1, 0.4),
    "gpt-5": Price(1.25, 10),
    "gpt-5-mini": Price(0.25, 2),
    "gpt-5-nano": Price(0.05, 0.4),
    "gpt-5-pro": Price(15, 120),
    "o3": Price(2, 8),
    "o4-mini": Price(1.1, 4.4),
    "claude-opus-4-5": Price(5, 25),
    "claude-sonnet-4-5": Price(3, 15),
    "claude-haiku-4-5": Price(1, 5),
    "gemini-2.5-pro": Price(2.5, 15),
    "gemini-2.5-flash": Price(0.3, 2.5),
    "gemini-2.5-flash-lite": Price(0.1, 0.4),
}
"""Providers' list prices by model; the highest one if the price depends on the prompt's length."""


def price_for(workspace: Workspace, model: str) -> Price | None:
    """Returns the price of a model, or None if neither prices.yml nor the table has it.

    Raises InputError if prices.yml exists and is malformed.
    """
    own = _read_prices(workspace).models
    # Some dated models have their own price, so the name with its date is looked up first.
    dated = model.rpartition("/")[2]
    return own.get(model) or _LISTED.get(dated) or _LISTED.get(_plain_name(model))


def known_price(workspace: Workspace, model: str) -> Price:
    """Returns the price of a model for a run with a budget in US dollars, which needs one.

    Raises InputError if the price is unknown.
    """
    price = price_for(workspace, model)
    if price is not None:
        return price
    raise InputError(
        f"budget_usd needs the price of {model!r}, which is not in the table of {PRICES_AS_OF}",
        f"write it to {workspace.root / PRICES_FILE}, in US dollars per million tokens: "
        f'"{model}": {{input: 0.15, output: 0.60}}',
    )


def machine_usd_per_hour(workspace: Workspace) -> float | None:
    """Returns what an hour of this machine costs, as prices.yml says; None if it does not.

    Raises InputError if prices.yml exists and is malformed.
    """
    return _read_prices(workspace).usd_per_hour


def _plain_name(model: str) -> str:
    """Returns a model's name without maker and date, e.g. openai/gpt-5-2025-08-07 -> gpt-5."""
    name = model.rpartition("/")[2]
    name = re.sub(r"-(\d{8}|\d{4}-\d{2}-\d{2}|latest)$", "", name)
    return re.sub(r"(?<=-\d)\.(?=\d$)", "-", name) if name.startswith("claude") else name


@dataclass(frozen=True, slots=True)
class _PricesFile:
    """The content of prices.yml."""

    models: dict[str, Price]
    usd_per_hour: float | None = None


def _read_prices(workspace: Workspace) -> _PricesFile:
    path = workspace.root / PRICES_FILE
    if not path.exists():
        return _PricesFile({})
    check_readable(path)
    try:
        read: dict[Any, Any] = dict(read_yaml(path.read_text(encoding="utf-8")) or {})
        machine = read.pop(MACHINE, None)
        hourly = None if machine is None else float(machine["usd_per_hour"])
        if hourly is not None and not hourly >= 0:
            raise ValueError("usd_per_hour is not a number of dollars")
        return _PricesFile({str(name): _own_price(entry) for name, entry in read.items()}, hourly)
    except (yaml.YAMLError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise DocumentError(
            unreadable(path, error),
            'write lines such as "my-model": {input: 0.15, output: 0.60}, and for this machine '
            f"{MACHINE}: {{usd_per_hour: 1.2}}",
        ) from error


def _own_price(entry: dict[str, Any]) -> Price:
    price = Price(float(entry["input"]), float(entry["output"]))
    if not (price.prompt >= 0 and price.completion >= 0):
        raise ValueError("a price is not a number of dollars")
    return price

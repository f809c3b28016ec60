"""Looks up the price of a model's tokens: in the workspace's prices.yml, or else in a dated list.

The list is the file beside this module, or a newer one that `stillroom prices --refresh` wrote into
the workspace.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stillroom.errors import DocumentError, InputError
from stillroom.secrecy.readable import check_readable, unreadable
from stillroom.settings import Workspace
from stillroom.types import Usage
from stillroom.yaml_text import read_yaml

PRICES_FILE = "prices.yml"
LIST_FILE = "list_prices.yml"
"""The name of the dated list of providers' prices, in this package and in a workspace."""
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


@dataclass(frozen=True, slots=True)
class PriceList:
    """A dated list of what providers ask for their models; the highest price where it varies."""

    as_of: str
    models: Mapping[str, Price]

    def find(self, model: str) -> Price | None:
        """Returns the price of a model, by its whole name or without its maker and date."""
        # Some dated models have their own price, so the name with its date is looked up first.
        names = (model, model.rpartition("/")[2], plain_name(model))
        return next((self.models[name] for name in names if name in self.models), None)


def price_list(workspace: Workspace) -> PriceList:
    """Returns the newer of the shipped list and the workspace's own.

    Raises DocumentError if the workspace's own is malformed.
    """
    path, shipped = workspace.root / LIST_FILE, _shipped()
    if not path.exists():
        return shipped
    own = read_price_list(path)
    return own if own.as_of >= shipped.as_of else shipped


@functools.cache
def _shipped() -> PriceList:
    return read_price_list(Path(__file__).with_name(LIST_FILE))


def read_price_list(path: Path) -> PriceList:
    """Returns the list in a file. Raises DocumentError if it is malformed."""
    check_readable(path)
    try:
        read: dict[str, Any] = dict(read_yaml(path.read_text(encoding="utf-8")))
        models: dict[Any, Any] = dict(read["models"])
        prices = {str(name): _own_price(entry) for name, entry in models.items()}
        return PriceList(str(read["as_of"]), prices)
    except (yaml.YAMLError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise DocumentError(
            unreadable(path, error), "write it again with `stillroom prices --refresh`"
        ) from error


def price_for(workspace: Workspace, model: str) -> Price | None:
    """Returns the price of a model, or None if neither prices.yml nor the table has it.

    Raises InputError if prices.yml exists and is malformed.
    """
    own = _read_prices(workspace).models
    return own.get(model) or price_list(workspace).find(model)


def known_price(workspace: Workspace, model: str) -> Price:
    """Returns the price of a model for a run with a budget in US dollars, which needs one.

    Raises InputError if the price is unknown.
    """
    price = price_for(workspace, model)
    if price is not None:
        return price
    raise InputError(
        f"budget_usd needs the price of {model!r}, which is not in the list of "
        f"{price_list(workspace).as_of}",
        "get a newer list with `stillroom prices --refresh`, or write it to "
        f"{workspace.root / PRICES_FILE}, in US dollars per million tokens: "
        f'"{model}": {{input: 0.15, output: 0.60}}',
    )


def machine_usd_per_hour(workspace: Workspace) -> float | None:
    """Returns what an hour of this machine costs, as prices.yml says; None if it does not.

    Raises InputError if prices.yml exists and is malformed.
    """
    return _read_prices(workspace).usd_per_hour


def plain_name(model: str) -> str:
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

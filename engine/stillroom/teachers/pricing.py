"""Looks up the price of a model's tokens: in the workspace's prices.yml, or else in a dated list.

The list is the file next to this module, or a newer one that `stillroom prices --refresh` wrote
into the workspace.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import yaml

from stillroom import bounds
from stillroom.errors import DocumentError, InputError, TeacherError
from stillroom.files import write_atomic
from stillroom.lineage import now
from stillroom.secrecy.readable import check_readable, parse_error_message
from stillroom.settings import Workspace
from stillroom.teachers.providers import PROVIDERS
from stillroom.teachers.tls import client_context
from stillroom.types import Usage
from stillroom.yaml_text import read_yaml

if TYPE_CHECKING:
    import httpx
PRICES_FILE = "prices.yml"
LIST_FILE = "list_prices.yml"
"""The name of the dated list of providers' prices, in this package and in a workspace."""
WORKSPACE = "workspace"
"""The key of prices.yml that limits what all runs may cost: `workspace: {budget_usd: 20}`."""
MACHINE = "machine"
"""The key of prices.yml that gives the price of this machine: `machine: {usd_per_hour: 1.2}`."""
_MILLION = 1_000_000
SOURCE = "https://openrouter.ai/api/v1/models"
_TIMEOUT_S = 30.0
_MAX_BYTES = bounds.PRICE_LIST.limit
_MAKERS = frozenset(provider.name for provider in PROVIDERS.values() if provider.makes_models)
_NAME = re.compile(r"[\w.:~/-]{1,120}")
_HEADER = """# Prices of models in US dollars per million tokens, as OpenRouter lists them.
# Written by `stillroom prices --refresh`; your own prices in prices.yml take precedence.
"""


@dataclass(frozen=True, slots=True)
class Price:
    """A model's prices for prompt and completion tokens, in US dollars per million tokens."""

    prompt: float
    completion: float

    @property
    def is_charged(self) -> bool:
        """Whether calls cost anything."""
        return self.prompt > 0 or self.completion > 0

    def of(self, usage: Usage) -> float:
        """Returns the price of a call with this usage, in US dollars."""
        total = self.prompt * usage.prompt_tokens + self.completion * usage.completion_tokens
        return total / _MILLION


FREE = Price(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PriceList:
    """A dated list of model prices; where providers differ, a model's highest price."""

    as_of: str
    models: Mapping[str, Price]

    def find(self, model: str) -> Price | None:
        """Returns the price of a model, by its full name or without its maker and date."""
        # Some dated models have their own price, so the name with its date is looked up first.
        names = (model, model.rpartition("/")[2], base_model_name(model))
        return next((self.models[name] for name in names if name in self.models), None)


def price_list(workspace: Workspace) -> PriceList:
    """Returns the newer of the shipped list and the workspace's list.

    Raises DocumentError if the workspace's list is malformed.
    """
    path, shipped = workspace.root / LIST_FILE, _shipped()
    if not path.exists():
        return shipped
    refreshed = read_price_list(path)
    return refreshed if refreshed.as_of >= shipped.as_of else shipped


@functools.cache
def _shipped() -> PriceList:
    return read_price_list(Path(__file__).with_name(LIST_FILE))


def read_price_list(path: Path) -> PriceList:
    """Returns the list in a file. Raises DocumentError if it is malformed."""
    check_readable(path)
    try:
        content: dict[str, Any] = dict(read_yaml(path.read_text(encoding="utf-8")))
        models: dict[Any, Any] = dict(content["models"])
        prices = {str(name): _price_of_entry(entry) for name, entry in models.items()}
        return PriceList(str(content["as_of"]), prices)
    except (yaml.YAMLError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise DocumentError(
            parse_error_message(path, error), "recreate it with `stillroom prices --refresh`"
        ) from error


def price_for(workspace: Workspace, model: str) -> Price | None:
    """Returns the price of a model, or None if neither prices.yml nor the list has it.

    Raises InputError if prices.yml exists and is malformed.
    """
    user_prices = _read_prices(workspace).models
    return user_prices.get(model) or price_list(workspace).find(model)


def has_own_price(workspace: Workspace, model: str) -> bool:
    """Returns whether the user has given the price of a model, in prices.yml."""
    return model in _read_prices(workspace).models


def require_price(workspace: Workspace, model: str) -> Price:
    """Returns the price of a model for a run with a budget in US dollars, which needs one.

    Raises InputError if the price is unknown.
    """
    price = price_for(workspace, model)
    if price is not None:
        return price
    raise InputError(
        f"budget_usd needs the price of {model!r}, which neither {PRICES_FILE} nor the list of "
        f"{price_list(workspace).as_of} has",
        "get a newer list with `stillroom prices --refresh`, or write the price to "
        f"{workspace.root / PRICES_FILE}, in US dollars per million tokens: "
        f'"{model}": {{input: 0.15, output: 0.60}}',
    )


def machine_usd_per_hour(workspace: Workspace) -> float | None:
    """Returns the hourly price of this machine from prices.yml; None if it has none.

    Raises InputError if prices.yml exists and is malformed.
    """
    return _read_prices(workspace).usd_per_hour


def workspace_budget_usd(workspace: Workspace) -> float | None:
    """Returns what all runs of the workspace may cost together; None without a limit.

    Raises InputError if prices.yml exists and is malformed.
    """
    return _read_prices(workspace).budget_usd


def base_model_name(model: str) -> str:
    """Returns a model's name without maker and date, e.g. openai/gpt-5-2025-08-07 -> gpt-5."""
    name = model.rpartition("/")[2]
    name = re.sub(r"-(\d{8}|\d{4}-\d{2}-\d{2}|latest)$", "", name)
    return re.sub(r"(?<=-\d)\.(?=\d$)", "-", name) if name.startswith("claude") else name


@dataclass(frozen=True, slots=True)
class _PricesFile:
    """The content of prices.yml."""

    models: dict[str, Price]
    usd_per_hour: float | None = None
    budget_usd: float | None = None


def _read_prices(workspace: Workspace) -> _PricesFile:
    """Returns the content of prices.yml; empty if there is none."""
    path = workspace.root / PRICES_FILE
    if not path.exists():
        return _PricesFile({})
    check_readable(path)
    try:
        content: dict[Any, Any] = dict(read_yaml(path.read_text(encoding="utf-8")) or {})
        hourly = _amount(content.pop(MACHINE, None), "usd_per_hour")
        budget = _amount(content.pop(WORKSPACE, None), "budget_usd")
        models = {str(name): _price_of_entry(entry) for name, entry in content.items()}
        return _PricesFile(models, hourly, budget)
    except (yaml.YAMLError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise DocumentError(
            parse_error_message(path, error),
            'write a line for each entry: `"my-model": {input: 0.15, output: 0.60}` in dollars per '
            f"million tokens, `{MACHINE}: {{usd_per_hour: 1.2}}` for this machine's time, "
            f"`{WORKSPACE}: {{budget_usd: 20}}` to limit all runs together",
        ) from error


def _amount(entry: dict[str, Any] | None, name: str) -> float | None:
    """Returns the amount in US dollars in an entry of prices.yml; None without the entry."""
    if entry is None:
        return None
    amount = float(entry[name])
    if not amount >= 0:
        raise ValueError(f"{name} is negative or not a number")
    return amount


def _price_of_entry(entry: dict[str, Any]) -> Price:
    """Returns the price in an entry of prices.yml or list_prices.yml."""
    price = Price(float(entry["input"]), float(entry["output"]))
    if not (price.prompt >= 0 and price.completion >= 0):
        raise ValueError("a price is negative or not a number")
    return price


@dataclass(frozen=True, slots=True)
class RefreshedPrices:
    """The list of prices that was written, and how many models of the source had no price."""

    path: Path
    prices: PriceList
    num_unpriced: int


def refresh_prices(
    workspace: Workspace, *, source: str = SOURCE, transport: "httpx.BaseTransport | None" = None
) -> RefreshedPrices:
    """Downloads the current prices into the workspace; the request carries no key or other data.

    Raises TeacherError if the list cannot be fetched or read; the file is then unchanged.
    """
    models, num_unpriced = _listed_prices(_fetch(source, transport))
    if not models:
        raise TeacherError(f"{source} lists no prices", "try again later; nothing was changed")
    prices = PriceList(now()[:10], models)
    path = workspace.root / LIST_FILE
    lines = [
        f"  {name!r}: {{input: {price.prompt:.6g}, output: {price.completion:.6g}}}\n"
        for name, price in sorted(models.items())
    ]
    text = f"{_HEADER}as_of: {prices.as_of}\nmodels:\n{''.join(lines)}"
    write_atomic(path, text.encode())
    return RefreshedPrices(path, prices, num_unpriced)


def _fetch(source: str, transport: "httpx.BaseTransport | None") -> bytes:
    """Returns the body of the price list. Raises TeacherError if it cannot be downloaded."""
    # Imported here, so that the server starts faster.
    import httpx

    fix = "check the connection and try again; the prices are unchanged"
    try:
        with (
            httpx.Client(
                transport=transport, timeout=_TIMEOUT_S, verify=client_context()
            ) as client,
            client.stream("GET", source) as response,
        ):
            response.raise_for_status()
            data = bytearray()
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > _MAX_BYTES:
                    raise TeacherError(f"{source} sent more than {_MAX_BYTES >> 20} MB", fix)
    except httpx.HTTPError as error:
        raise TeacherError(f"{source} cannot be read: {error}", fix) from error
    return bytes(data)


def _listed_prices(data: bytes) -> tuple[dict[str, Price], int]:
    """Returns the prices of the models in OpenRouter's list, and how many have none."""
    try:
        listed: Any = msgspec.json.decode(data)["data"]
        entries = [cast("dict[str, Any]", entry) for entry in listed]
    except (msgspec.DecodeError, TypeError, KeyError, RecursionError) as error:
        raise TeacherError(
            f"the price list has an unexpected format: {error}",
            "write the price that you need into prices.yml",
        ) from error
    models, num_unpriced = dict[str, Price](), 0
    for entry in entries:
        price = _listed_price(entry)
        if price is None:
            num_unpriced += 1
            continue
        name = str(entry["id"])
        models[name] = price
        # OpenRouter sells the models of these providers at the providers' own prices.
        if name.partition("/")[0] in _MAKERS and ":" not in name:
            models.setdefault(base_model_name(name), price)
    return models, num_unpriced


def _listed_price(entry: dict[str, Any]) -> Price | None:
    """Returns the price in an entry of OpenRouter's list; None if it has none or varies (-1)."""
    try:
        pricing = entry["pricing"]
        price = Price(float(pricing["prompt"]) * _MILLION, float(pricing["completion"]) * _MILLION)
        is_named = _NAME.fullmatch(entry["id"]) is not None
    except (TypeError, KeyError, ValueError):
        return None
    return price if is_named and price.prompt >= 0 and price.completion >= 0 else None

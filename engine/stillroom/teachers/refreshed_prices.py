"""Fetches the prices of current models from OpenRouter's public list; writes them with the date."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from stillroom.errors import TeacherError
from stillroom.files import write_atomic
from stillroom.lineage import now
from stillroom.settings import Workspace
from stillroom.teachers.pricing import LIST_FILE, Price, PriceList, plain_name

if TYPE_CHECKING:
    import httpx

SOURCE = "https://openrouter.ai/api/v1/models"
_TIMEOUT_S = 30.0
_MAX_BYTES = 32 << 20
_MILLION = 1_000_000
_MAKERS = ("openai", "anthropic", "google")
_NAME = re.compile(r"[\w.:~/-]{1,120}")
_HEAD = """# Prices of models in US dollars per million tokens, as OpenRouter lists them.
# Written by `stillroom prices --refresh`; write your own prices into prices.yml, which wins.
"""


@dataclass(frozen=True, slots=True)
class RefreshedPrices:
    """A list of prices that was written, and how many listed models had no price."""

    path: Path
    prices: PriceList
    num_without: int


def refresh_prices(
    workspace: Workspace, *, source: str = SOURCE, transport: "httpx.BaseTransport | None" = None
) -> RefreshedPrices:
    """Writes the current prices into the workspace; sends no key and nothing else.

    Raises TeacherError if the list cannot be fetched or read; the file then stays as it is.
    """
    models, num_without = _prices(_fetched(source, transport))
    if not models:
        raise TeacherError(f"{source} lists no prices", "try again later; nothing was changed")
    prices = PriceList(now()[:10], models)
    path = workspace.root / LIST_FILE
    lines = [
        f"  {name!r}: {{input: {price.prompt:.6g}, output: {price.completion:.6g}}}\n"
        for name, price in sorted(models.items())
    ]
    text = f"{_HEAD}as_of: {prices.as_of}\nmodels:\n{''.join(lines)}"
    write_atomic(path, text.encode())
    return RefreshedPrices(path, prices, num_without)


def _fetched(source: str, transport: "httpx.BaseTransport | None") -> bytes:
    # Imported here, since no other call of the server needs it at once.
    import httpx

    fix = "check the connection and try again; the prices stay as they are"
    try:
        with (
            httpx.Client(transport=transport, timeout=_TIMEOUT_S) as client,
            client.stream("GET", source) as response,
        ):
            response.raise_for_status()
            data = bytearray()
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > _MAX_BYTES:
                    raise TeacherError(f"{source} sends more than {_MAX_BYTES >> 20} MB", fix)
    except httpx.HTTPError as error:
        raise TeacherError(f"{source} cannot be read: {error}", fix) from error
    return bytes(data)


def _prices(data: bytes) -> tuple[dict[str, Price], int]:
    """Returns the prices of the models in OpenRouter's list, and how many have none."""
    try:
        listed: Any = msgspec.json.decode(data)["data"]
        entries = [cast("dict[str, Any]", entry) for entry in listed]
    except (msgspec.DecodeError, TypeError, KeyError, RecursionError) as error:
        raise TeacherError(
            f"the list of prices has another form than before: {error}",
            "write the price that you need into prices.yml",
        ) from error
    models, num_without = dict[str, Price](), 0
    for entry in entries:
        price = _price(entry)
        if price is None:
            num_without += 1
            continue
        name = str(entry["id"])
        models[name] = price
        # At OpenRouter these makers' models cost what they cost at the maker itself.
        if name.partition("/")[0] in _MAKERS and ":" not in name:
            models.setdefault(plain_name(name), price)
    return models, num_without


def _price(entry: dict[str, Any]) -> Price | None:
    """Returns the price in an entry; None if there is none, or one that varies (-1)."""
    try:
        pricing = entry["pricing"]
        price = Price(float(pricing["prompt"]) * _MILLION, float(pricing["completion"]) * _MILLION)
        is_named = _NAME.fullmatch(entry["id"]) is not None
    except (TypeError, KeyError, ValueError):
        return None
    return price if is_named and price.prompt >= 0 and price.completion >= 0 else None

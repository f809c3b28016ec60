"""The paths that requests name and outputs record, in a run that is done on another machine.

Such a run finds its files in a folder of its own, made for it. Requests, config.yml and everything
that is recorded name the same files by their paths at home, on the machine of the user. So what a
name leads to is looked up with `as_found`, and what is recorded is written with `as_recorded`. In a
run at home both leave every path as it is.
"""

import json
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import msgspec

_VARIABLE = "STILLROOM_HOME_PATHS"
"""The variable with the paths at home, each with the path here that stands for it, as JSON.

The path `~` stands for the user's own folder, of which the value is the path at home.
"""

_TEXTS = frozenset({".json", ".md", ".txt", ".jinja", ".yml", ".yaml"})


def home_variable(paths: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns the variable for a run's process, made of pairs of a path at home and one here.

    Of several paths at home for one here, the first is recorded. Those here must be absolute, and
    lead through no link.
    """
    first: dict[str, str] = {}
    for home, here in paths:
        first.setdefault(home, here)
    return {_VARIABLE: msgspec.json.encode(first).decode()}


def is_away() -> bool:
    """Whether this process does the work of a run on another machine than the user's."""
    return bool(os.environ.get(_VARIABLE))


def as_recorded(path: Path | str) -> str:
    """Returns the path at home of a file here, which is what outputs record."""
    text = str(path)
    for here, home in _known(os.environ.get(_VARIABLE, "")).by_here:
        if (rest := _below(text, here)) is not None:
            return home + rest
    return text


def as_found(path: Path | str) -> Path:
    """Returns the path on this machine of a file that a request or record names."""
    known = _known(os.environ.get(_VARIABLE, ""))
    if not known.by_here:
        return Path(path)
    text = str(path)
    if (rest := _below(text, "~")) is not None and known.own_folder is not None:
        text = known.own_folder + rest
    if not os.path.isabs(text):  # noqa: PTH117
        return Path(text)
    # Only at home does `..` lead from one folder to the next; here they lie elsewhere.
    at_home = os.path.normpath(as_recorded(text))
    for home, here in known.by_home:
        if (rest := _below(at_home, home)) is not None:
            return Path(here + rest)
    return Path(text)


class _Known(msgspec.Struct, frozen=True):
    """The pairs of paths, the longest first."""

    by_home: list[tuple[str, str]]
    by_here: list[tuple[str, str]]
    own_folder: str | None


@lru_cache(maxsize=8)
def _known(variable: str) -> _Known:
    paths = msgspec.json.decode(variable or "{}", type=dict[str, str])
    pairs = [(home, here) for home, here in paths.items() if home != "~"]
    return _Known(
        sorted(pairs, key=lambda pair: -len(pair[0])),
        sorted(((here, home) for home, here in pairs), key=lambda pair: -len(pair[0])),
        paths.get("~"),
    )


def _escaped(path: str) -> bytes:
    return json.dumps(path)[1:-1].encode()


def _below(path: str, folder: str) -> str | None:
    """Returns the rest of a path within a folder, "" for the folder itself; None if elsewhere."""
    if path == folder:
        return ""
    return path.removeprefix(folder) if path.startswith(folder.rstrip("/") + "/") else None


def name_as_at_home(folder: Path) -> None:
    """Replaces paths of this machine by those at home in text files that a library wrote.

    An example is the base model's path in an adapter's adapter_config.json. Weights stay.
    """
    known = _known(os.environ.get(_VARIABLE, ""))
    for path in sorted(folder.rglob("*")) if known.by_here else ():
        if path.suffix not in _TEXTS or not path.is_file():
            continue
        before = text = path.read_bytes()
        for here, home in known.by_here:
            text = text.replace(here.encode(), home.encode())
            # As a JSON text may hold it: with other letters than ASCII's escaped.
            text = text.replace(_escaped(here), _escaped(home))
        if text != before:
            path.write_bytes(text)

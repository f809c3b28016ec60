"""Maps paths between the user's machine (home) and the machine that does a remote run.

A remote run has its own folder for its files. Requests, config.yml and records name the same
files by their home paths, that is, their paths on the user's machine. `local_path` turns a home
path into the local path, and `home_path` turns a local path into the home path. On the user's
machine, both return the path unchanged.
"""

import json
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import msgspec

_VARIABLE = "STILLROOM_HOME_PATHS"
"""The environment variable with a JSON object from home paths to local paths.

The value of the key `~` is the user's home folder on the user's machine.
"""

_TEXT_SUFFIXES = frozenset({".json", ".md", ".txt", ".jinja", ".yml", ".yaml"})


def home_variable(paths: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns the environment variable for a run's process, from pairs of a home and a local path.

    If several home paths have the same local path, the first is recorded. Local paths must be
    absolute and contain no links.
    """
    local_by_home: dict[str, str] = {}
    for home, local in paths:
        local_by_home.setdefault(home, local)
    return {_VARIABLE: msgspec.json.encode(local_by_home).decode()}


def is_remote_process() -> bool:
    """Returns whether this process runs on another machine than the user's."""
    return bool(os.environ.get(_VARIABLE))


def home_path(path: Path | str) -> str:
    """Returns the home path of a local file, which is the path that outputs record."""
    text = str(path)
    for local, home in _path_map(os.environ.get(_VARIABLE, "")).by_local:
        if (suffix := _below(text, local)) is not None:
            return home + suffix
    return text


def local_path(path: Path | str) -> Path:
    """Returns the local path of a file that a request or record names by its home path."""
    path_map = _path_map(os.environ.get(_VARIABLE, ""))
    if not path_map.by_local:
        return Path(path)
    text = str(path)
    if (suffix := _below(text, "~")) is not None and path_map.home_folder is not None:
        text = path_map.home_folder + suffix
    if not os.path.isabs(text):  # noqa: PTH117
        return Path(text)
    # `..` must be resolved in the home path, since local folders are arranged differently.
    at_home = os.path.normpath(home_path(text))
    for home, local in path_map.by_home:
        if (suffix := _below(at_home, home)) is not None:
            return Path(local + suffix)
    return Path(text)


class _PathMap(msgspec.Struct, frozen=True):
    """Pairs of home and local paths, the longest first."""

    by_home: list[tuple[str, str]]
    by_local: list[tuple[str, str]]
    home_folder: str | None


@lru_cache(maxsize=8)
def _path_map(variable: str) -> _PathMap:
    paths = msgspec.json.decode(variable or "{}", type=dict[str, str])
    pairs = [(home, local) for home, local in paths.items() if home != "~"]
    return _PathMap(
        sorted(pairs, key=lambda pair: -len(pair[0])),
        sorted(((local, home) for home, local in pairs), key=lambda pair: -len(pair[0])),
        paths.get("~"),
    )


def _json_escaped(path: str) -> bytes:
    return json.dumps(path)[1:-1].encode()


def _below(path: str, folder: str) -> str | None:
    """Returns the part of a path after a folder ("" for the folder itself); None if outside."""
    if path == folder:
        return ""
    return path.removeprefix(folder) if path.startswith(folder.rstrip("/") + "/") else None


def restore_home_paths(folder: Path) -> None:
    """Replaces local paths with home paths in text files that a library wrote.

    An example is the base model's path in adapter_config.json. Other files are not changed.
    """
    path_map = _path_map(os.environ.get(_VARIABLE, ""))
    for path in sorted(folder.rglob("*")) if path_map.by_local else ():
        if path.suffix not in _TEXT_SUFFIXES or not path.is_file():
            continue
        before = text = path.read_bytes()
        for local, home in path_map.by_local:
            text = text.replace(local.encode(), home.encode())
            # JSON files may contain the path with escaped non-ASCII characters.
            text = text.replace(_json_escaped(local), _json_escaped(home))
        if text != before:
            path.write_bytes(text)

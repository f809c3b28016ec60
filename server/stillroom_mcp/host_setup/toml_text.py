"""Changes one table in the text of a TOML file; all else stays as it is."""

import json
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from stillroom_mcp.host_setup.json_text import merged_entry

_HEADER = re.compile(r"^[ \t]*\[", re.MULTILINE)


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the values of a TOML text. Raises ValueError with the line and the reason."""
    return tomllib.loads(text.removeprefix("\ufeff"))


def toml_with_entry(text: str, path: Sequence[str], entry: dict[str, Any]) -> str:
    """Returns the text with `entry` as the table of that name, at the end if it is new.

    A table that is there keeps the keys that the new one lacks, and its tables. Raises ValueError
    for a text that cannot be read, or that holds the table in another form than under a header.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    before = parse_toml(text)
    *outer, last = path
    tables: Any = before
    for key in outer:
        tables = tables.get(key, {})
        if not isinstance(tables, dict):
            raise ValueError(f"{key} holds no tables")
    present = tables.get(last)
    merged = merged_entry(present or {}, entry)
    if merged == present:
        return text
    name = ".".join(path)
    expected = before
    for key in outer:
        expected = expected.setdefault(key, {})
    expected[last] = merged
    try:
        body = "".join(
            f"{key} = {json.dumps(value, ensure_ascii=False)}{newline}"
            for key, value in merged.items()
            if not isinstance(value, dict)
        )
        changed = _with_table(text, name, f"[{name}]{newline}{body}", newline)
        is_right = parse_toml(changed) == before
    # TypeError: a value of a kind that JSON lacks, such as a date.
    except (ValueError, TypeError):
        is_right, changed = False, text
    if not is_right:
        raise ValueError(f"it holds {name} in another form than plain values under [{name}]")
    return changed


def _with_table(text: str, name: str, table: str, newline: str) -> str:
    header = re.search(rf"^[ \t]*\[{re.escape(name)}\][^\n]*(?:\n|\Z)", text, re.MULTILINE)
    if header is None:
        if not text:
            return table
        return text + ("" if text.endswith("\n") else newline) + newline + table
    following = _HEADER.search(text, header.end())
    end = following.start() if following else len(text)
    # Blank lines and comments before the next header belong to that one.
    inside = text[header.end() : end]
    kept = re.search(r"(?:[ \t]*(?:#[^\n]*)?\r?\n)*\Z", inside)
    return text[: header.start()] + table + (kept[0] if kept else "") + text[end:]

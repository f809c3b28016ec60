"""Changes one entry in the text of a JSON or TOML file; everything else stays as it is."""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Hosts read JSON with comments and commas at the end, so those are passed over.
_TOKEN = re.compile(
    r"(?P<blank>(?:[\s\ufeff]|//[^\n]*|/\*.*?\*/)+)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*")'
    r"|(?P<sign>[{}\[\],:])"
    r'|(?P<word>[^\s{}\[\],:"/]+)',
    re.DOTALL,
)
_REST_OF_LINE = re.compile(
    r"(?P<comma>[ \t]*,)?(?P<note>[ \t]*(?://[^\r\n]*|/\*[^\n]*?\*/))?[ \t\r]*$", re.MULTILINE
)


@dataclass(slots=True)
class _Value:
    """A value and its position in the text; an object also has its members by their keys."""

    value: Any
    start: int
    end: int
    members: dict[str, "_Value"] | None = None
    key_start: int = 0
    """The position of its key in the object that holds it."""


@dataclass(slots=True)
class _Reader:
    text: str
    position: int = 0
    tokens: list[re.Match[str]] = field(default_factory=list[re.Match[str]])

    def __post_init__(self) -> None:
        position = 0
        while position < len(self.text):
            token = _TOKEN.match(self.text, position)
            if token is None:
                raise self.fault(position, "this is not JSON")
            if token.lastgroup != "blank":
                self.tokens.append(token)
            position = token.end()

    def fault(self, position: int, reason: str) -> ValueError:
        return ValueError(f"line {self.text.count(chr(10), 0, position) + 1}: {reason}")

    def next(self, expected: str = "") -> re.Match[str]:
        if self.position == len(self.tokens):
            raise self.fault(len(self.text), "the file ends too early")
        token = self.tokens[self.position]
        if expected and token.group() not in expected:
            raise self.fault(token.start(), f"expected {' or '.join(expected)}")
        self.position += 1
        return token

    def is_at(self, sign: str) -> bool:
        return self.position < len(self.tokens) and self.tokens[self.position].group() == sign

    def document(self) -> _Value:
        value = self.value()
        if self.position < len(self.tokens):
            raise self.fault(self.tokens[self.position].start(), "something follows the end")
        return value

    def value(self) -> _Value:
        token = self.next()
        if token.group() == "{":
            return self.object(token.start())
        if token.group() == "[":
            return self.array(token.start())
        return _Value(self.scalar(token), token.start(), token.end())

    def scalar(self, token: re.Match[str]) -> Any:
        try:
            return json.loads(token.group())
        except ValueError:
            raise self.fault(token.start(), "this is not a JSON value") from None

    def object(self, start: int) -> _Value:
        members: dict[str, _Value] = {}
        while not self.is_at("}"):
            key = self.next()
            if key.lastgroup != "text":
                raise self.fault(key.start(), "expected a key in double quotes")
            name = self.scalar(key)
            if name in members:
                raise self.fault(key.start(), f"the key {name!r} is here twice")
            self.next(":")
            members[name] = self.value()
            members[name].key_start = key.start()
            if not self.is_at("}"):
                self.next(",")
        values = {name: member.value for name, member in members.items()}
        return _Value(values, start, self.next("}").end(), members)

    def array(self, start: int) -> _Value:
        values: list[Any] = []
        while not self.is_at("]"):
            values.append(self.value().value)
            if not self.is_at("]"):
                self.next(",")
        return _Value(values, start, self.next("]").end())


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text, which may have comments and commas at the end.

    Raises ValueError with the line and the reason.
    """
    return _read(text).value


def json_with_entry(text: str, path: Sequence[str], entry: dict[str, Any]) -> str:
    """Returns the text with `entry` at the keys of `path`; objects on the way are made.

    An entry that is there keeps the keys that the new one lacks, such as its environment. Raises
    ValueError for a text that cannot be read, or where a key on the way holds no object.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    if not text.strip("\ufeff \t\r\n"):
        text = "{}\n"
    at = _read(text)
    for depth, key in enumerate(path):
        if at.members is None:
            where = ".".join(path[:depth]) or "the file"
            raise ValueError(f"{where} holds no object ({{…}}) in which {key!r} could stand")
        if key not in at.members:
            for outer in reversed(path[depth + 1 :]):
                entry = {outer: entry}
            return _with_member(text, at, key, entry, newline)
        at = at.members[key]
    merged = merged_entry(at.value, entry)
    if merged == at.value:
        return text
    return (
        text[: at.start]
        + _rendered(merged, text, _indent_at(text, at.start), newline)
        + text[at.end :]
    )


def json_without_entry(text: str, path: Sequence[str]) -> str:
    """Returns the text without the member at the keys of `path`. Raises ValueError if it cannot."""
    expected = parse_json(text)
    at, parent = _read(text), expected
    for key in path[:-1]:
        at, parent = (at.members or {})[key], parent[key]
    members = at.members or {}
    entry = members[path[-1]]
    earlier = [member.end for member in members.values() if member.end < entry.key_start]
    comma = re.compile(r"[ \t]*,").match(text, entry.end)
    end = comma.end() if comma else entry.end
    # The line break and the blanks before it go with it.
    before = re.sub(r"(?:\r?\n)?[ \t]*\Z", "", text[: entry.key_start], count=1)
    if comma is None and earlier:
        between = before[earlier[-1] :]
        before = before[: earlier[-1]] + between.replace(",", "", 1)
    changed = before + text[end:]
    del parent[path[-1]]
    if parse_json(changed) != expected:
        raise ValueError("the entry cannot be told from what surrounds it")
    return changed


def merged_entry(present: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry with what the user has added to the present one, if that is of its kind."""
    if not isinstance(present, dict) or any("url" in str(key).lower() for key in present):
        return entry
    return {**present, **entry}


def _read(text: str) -> _Value:
    try:
        return _Reader(text).document()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _with_member(text: str, at: _Value, key: str, value: Any, newline: str) -> str:
    outer = _indent_at(text, at.start)
    members = list((at.members or {}).values())
    inner = _indent_at(text, members[-1].start) if members else outer + _unit(text)
    member = f"{json.dumps(key)}: {_rendered(value, text, inner, newline)}"
    if not members:
        inside = text[at.start + 1 : at.end - 1].rstrip()
        ending = newline + outer
        return f"{text[: at.start + 1]}{inside}{newline}{inner}{member}{ending}{text[at.end - 1 :]}"
    end = members[-1].end
    # A comment after the last member stays with it, a trailing comma stays last.
    rest = _REST_OF_LINE.match(text, end)
    comma, note = (rest["comma"] or "", rest["note"] or "") if rest else ("", "")
    end_of_rest = end + len(comma) + len(note)
    member = f"{newline}{inner}{member}{comma.strip()}"
    return f"{text[:end]},{note}{member}{text[end_of_rest:]}"


def _rendered(value: Any, text: str, indent: str, newline: str) -> str:
    unit = _unit(text)
    lines = json.dumps(value, indent=unit, ensure_ascii=False)
    # Short lists, as those of arguments, stand in one line.
    lines = re.sub(
        r'\[\s+((?:"(?:[^"\\]|\\.)*"|[^\[\]{}"])*?)\s+\]',
        lambda found: "[" + re.sub(r",\s*\n\s*", ", ", found[1]) + "]",
        lines,
    )
    return lines.replace("\n", newline + indent)


def _unit(text: str) -> str:
    """Returns what the file indents by: the blanks before its first indented key."""
    found = re.search(r'^([ \t]+)"', text, re.MULTILINE)
    return found[1] if found else "  "


def _indent_at(text: str, position: int) -> str:
    """Returns the blanks at the beginning of the line that a position is in."""
    line = text[text.rfind("\n", 0, position) + 1 : position]
    return line[: len(line) - len(line.lstrip(" \t"))]


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


def toml_without_entry(text: str, path: Sequence[str]) -> str:
    """Returns the text without the table of that name. Raises ValueError if it cannot."""
    expected = parse_toml(text)
    outer = expected
    for key in path[:-1]:
        outer = outer[key]
    del outer[path[-1]]
    if len(path) > 1 and not outer:
        del expected[path[0]]
    name = re.escape(".".join(path))
    header = re.search(rf"^[ \t]*\[{name}\][^\n]*(?:\n|\Z)", text, re.MULTILINE)
    if header is None:
        raise ValueError("the entry has no header of its own")
    following = _HEADER.search(text, header.end())
    changed = text[: header.start()] + (text[following.start() :] if following else "")
    if parse_toml(changed) != expected:
        raise ValueError("the entry cannot be told from what surrounds it")
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

"""Changes one entry in the text of a JSON or TOML file, and keeps everything else unchanged."""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Hosts accept comments and trailing commas in their JSON files.
_TOKEN = re.compile(
    r"(?P<blank>(?:[\s\ufeff]|//[^\n]*|/\*.*?\*/)+)"
    r'|(?P<string>"(?:[^"\\\n]|\\.)*")'
    r"|(?P<punctuation>[{}\[\],:])"
    r'|(?P<word>[^\s{}\[\],:"/]+)',
    re.DOTALL,
)
_LINE_END = re.compile(
    r"(?P<comma>[ \t]*,)?(?P<comment>[ \t]*(?://[^\r\n]*|/\*[^\n]*?\*/))?[ \t\r]*$", re.MULTILINE
)


@dataclass(slots=True)
class _Value:
    """A value and its position in the text; for an object, also its members by key."""

    value: Any
    start: int
    end: int
    members: dict[str, "_Value"] | None = None
    key_start: int = 0
    """The position of its key in the enclosing object."""


@dataclass(slots=True)
class _Reader:
    """Parses JSON with comments and trailing commas, and records the position of each value."""

    text: str
    position: int = 0
    tokens: list[re.Match[str]] = field(default_factory=list[re.Match[str]])

    def __post_init__(self) -> None:
        position = 0
        while position < len(self.text):
            token = _TOKEN.match(self.text, position)
            if token is None:
                raise self.syntax_error(position, "this is not JSON")
            if token.lastgroup != "blank":
                self.tokens.append(token)
            position = token.end()

    def syntax_error(self, position: int, reason: str) -> ValueError:
        return ValueError(f"line {self.text.count(chr(10), 0, position) + 1}: {reason}")

    def next(self, expected: str = "") -> re.Match[str]:
        if self.position == len(self.tokens):
            raise self.syntax_error(len(self.text), "unexpected end of file")
        token = self.tokens[self.position]
        if expected and token.group() not in expected:
            raise self.syntax_error(token.start(), f"expected {' or '.join(expected)}")
        self.position += 1
        return token

    def is_at(self, token: str) -> bool:
        return self.position < len(self.tokens) and self.tokens[self.position].group() == token

    def document(self) -> _Value:
        value = self.value()
        if self.position < len(self.tokens):
            raise self.syntax_error(
                self.tokens[self.position].start(), "unexpected text after the end of the document"
            )
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
            raise self.syntax_error(token.start(), "this is not a JSON value") from None

    def object(self, start: int) -> _Value:
        members: dict[str, _Value] = {}
        while not self.is_at("}"):
            key = self.next()
            if key.lastgroup != "string":
                raise self.syntax_error(key.start(), "expected a key in double quotes")
            name = self.scalar(key)
            if name in members:
                raise self.syntax_error(key.start(), f"duplicate key {name!r}")
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
    """Returns the value of a JSON text, which may have comments and trailing commas.

    Raises ValueError with the line and the reason.
    """
    return _read(text).value


def json_with_entry(text: str, path: Sequence[str], entry: dict[str, Any]) -> str:
    """Returns the text with `entry` at the keys of `path`; missing objects are created.

    An existing entry keeps its additional keys, such as its environment. Raises ValueError if the
    text cannot be parsed, or if the value at one of the keys is not an object.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    if not text.strip("\ufeff \t\r\n"):
        text = "{}\n"
    node = _read(text)
    for depth, key in enumerate(path):
        if node.members is None:
            where = ".".join(path[:depth]) or "the file"
            raise ValueError(f"{where} is not an object ({{…}}), so {key!r} cannot be added to it")
        if key not in node.members:
            for outer in reversed(path[depth + 1 :]):
                entry = {outer: entry}
            return _with_member(text, node, key, entry, newline)
        node = node.members[key]
    merged = merged_entry(node.value, entry)
    if merged == node.value:
        return text
    return (
        text[: node.start]
        + _rendered(merged, text, _indent_at(text, node.start), newline)
        + text[node.end :]
    )


def json_without_entry(text: str, path: Sequence[str]) -> str:
    """Returns the text without the member at `path`. Raises ValueError if that is not possible."""
    expected = parse_json(text)
    node, parent = _read(text), expected
    for key in path[:-1]:
        node, parent = (node.members or {})[key], parent[key]
    members = node.members or {}
    entry = members[path[-1]]
    earlier = [member.end for member in members.values() if member.end < entry.key_start]
    comma = re.compile(r"[ \t]*,").match(text, entry.end)
    end = comma.end() if comma else entry.end
    # The line break and the indentation before the entry are removed too.
    before = re.sub(r"(?:\r?\n)?[ \t]*\Z", "", text[: entry.key_start], count=1)
    if comma is None and earlier:
        between = before[earlier[-1] :]
        before = before[: earlier[-1]] + between.replace(",", "", 1)
    changed = before + text[end:]
    del parent[path[-1]]
    if parse_json(changed) != expected:
        raise ValueError("the entry cannot be separated from the text around it")
    return changed


def merged_entry(existing: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns `entry` with the additional keys of the existing entry.

    An existing entry with a URL is replaced, since it is for another kind of server.
    """
    if not isinstance(existing, dict) or any("url" in str(key).lower() for key in existing):
        return entry
    return {**existing, **entry}


def _read(text: str) -> _Value:
    try:
        return _Reader(text).document()
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None


def _with_member(text: str, node: _Value, key: str, value: Any, newline: str) -> str:
    """Returns the text with a member added at the end of the object `node`."""
    outer = _indent_at(text, node.start)
    members = list((node.members or {}).values())
    inner = _indent_at(text, members[-1].start) if members else outer + _indent_unit(text)
    member = f"{json.dumps(key)}: {_rendered(value, text, inner, newline)}"
    if not members:
        body = text[node.start + 1 : node.end - 1].rstrip()
        ending = newline + outer
        return (
            f"{text[: node.start + 1]}{body}{newline}{inner}{member}{ending}{text[node.end - 1 :]}"
        )
    end = members[-1].end
    # A comment after the last member stays on its line, and a trailing comma stays last.
    line_end = _LINE_END.match(text, end)
    comma, comment = (line_end["comma"] or "", line_end["comment"] or "") if line_end else ("", "")
    end_of_rest = end + len(comma) + len(comment)
    member = f"{newline}{inner}{member}{comma.strip()}"
    return f"{text[:end]},{comment}{member}{text[end_of_rest:]}"


def _rendered(value: Any, text: str, indent: str, newline: str) -> str:
    """Returns a value as JSON, indented as in the file `text`; `indent` is that of its line."""
    unit = _indent_unit(text)
    lines = json.dumps(value, indent=unit, ensure_ascii=False)
    # Short lists, such as lists of arguments, are written on one line.
    lines = re.sub(
        r'\[\s+((?:"(?:[^"\\]|\\.)*"|[^\[\]{}"])*?)\s+\]',
        lambda match: "[" + re.sub(r",\s*\n\s*", ", ", match[1]) + "]",
        lines,
    )
    return lines.replace("\n", newline + indent)


def _indent_unit(text: str) -> str:
    """Returns the indentation unit of the file: the whitespace before its first indented key."""
    match = re.search(r'^([ \t]+)"', text, re.MULTILINE)
    return match[1] if match else "  "


def _indent_at(text: str, position: int) -> str:
    """Returns the indentation of the line that contains a position."""
    line = text[text.rfind("\n", 0, position) + 1 : position]
    return line[: len(line) - len(line.lstrip(" \t"))]


_HEADER = re.compile(r"^[ \t]*\[", re.MULTILINE)


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the values of a TOML text. Raises ValueError with the line and the reason."""
    return tomllib.loads(text.removeprefix("\ufeff"))


def toml_with_entry(text: str, path: Sequence[str], entry: dict[str, Any]) -> str:
    """Returns the text with `entry` as the table `path`, appended if it is new.

    An existing table keeps its additional keys and subtables. Raises ValueError if the text cannot
    be parsed, or if the table is not written under a header of its own.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    document = parse_toml(text)
    *outer, last = path
    tables: Any = document
    for key in outer:
        tables = tables.get(key, {})
        if not isinstance(tables, dict):
            raise ValueError(f"{key} is not a table")
    existing = tables.get(last)
    merged = merged_entry(existing or {}, entry)
    if merged == existing:
        return text
    name = ".".join(path)
    table = document
    for key in outer:
        table = table.setdefault(key, {})
    table[last] = merged
    try:
        body = "".join(
            f"{key} = {json.dumps(value, ensure_ascii=False)}{newline}"
            for key, value in merged.items()
            if not isinstance(value, dict)
        )
        changed = _with_table(text, name, f"[{name}]{newline}{body}", newline)
        is_exact = parse_toml(changed) == document
    # TypeError: a value that JSON does not have, such as a date.
    except (ValueError, TypeError):
        is_exact, changed = False, text
    if not is_exact:
        raise ValueError(f"{name} is not written as plain values under the header [{name}]")
    return changed


def toml_without_entry(text: str, path: Sequence[str]) -> str:
    """Returns the text without the table `path`. Raises ValueError if it cannot be removed."""
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
        raise ValueError("the entry cannot be separated from the text around it")
    return changed


def _with_table(text: str, name: str, table: str, newline: str) -> str:
    """Returns the text with the table `name` replaced by the text `table`, or appended."""
    header = re.search(rf"^[ \t]*\[{re.escape(name)}\][^\n]*(?:\n|\Z)", text, re.MULTILINE)
    if header is None:
        if not text:
            return table
        return text + ("" if text.endswith("\n") else newline) + newline + table
    following = _HEADER.search(text, header.end())
    end = following.start() if following else len(text)
    # Blank lines and comments before the next header belong to the next table.
    inside = text[header.end() : end]
    trailing = re.search(r"(?:[ \t]*(?:#[^\n]*)?\r?\n)*\Z", inside)
    return text[: header.start()] + table + (trailing[0] if trailing else "") + text[end:]

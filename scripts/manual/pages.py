"""The pages of the documentation site that are made from the code, the skills and the README.

`hooks.py` hands them to MkDocs; nothing of them is kept as a file, so none can be out of date.
"""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from stillroom.api import OPERATIONS, Operation

ROOT = Path(__file__).parents[2]
_COPIED = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_TROUBLES = (
    "Every error says what failed, where, and what to do next. These are the code's own words, "
    "with … for names and numbers: search for some words of yours."
)
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#]*)(?P<place>#[^)]*)?\)")
_CODE = re.compile(r"^ *```.*?^ *```$|`(?P<name>[a-z./-]+)`", re.MULTILINE | re.DOTALL)


def generated_pages() -> dict[str, str]:
    """Returns the Markdown of all pages that are no files of docs/, by their addresses there."""
    pages = {address: _copied(name) for name, address in _COPIED.items()}
    for path in sorted((ROOT / "skills").rglob("*.md")):
        text = _FRONT_MATTER.sub("", path.read_text(encoding="utf-8"))
        pages[path.relative_to(ROOT).as_posix()] = text
    pages["concepts.md"] = _concepts()
    pages["reference.md"] = reference()
    pages["troubleshooting.md"] = troubleshooting()
    return pages


def with_site_links(text: str, address: str, known: set[str]) -> str:
    """Returns a page whose links lead to pages of the site; what the site lacks becomes text."""

    def changed(link: re.Match[str]) -> str:
        target = link["target"]
        if not target or "://" in target:
            return link[0]
        path = _from_root(address, target)
        if path in known:
            up = "../" * address.count("/")
            return f"{link['picture']}[{link['text']}]({up}{path}{link['place'] or ''})"
        return link["text"]

    return _LINK.sub(changed, text)


def with_skill_links(text: str, address: str, known: set[str]) -> str:
    """Returns a page on which the names of skills, and of their references, lead to their pages."""
    skill = "/".join(address.split("/")[:2])

    def linked(code: re.Match[str]) -> str:
        name = code["name"]
        for page in (f"skills/{name}/SKILL.md", f"{skill}/{name}"):
            if name and page in known and page != address:
                return f"[{code[0]}]({'../' * address.count('/')}{page})"
        return code[0]

    return _CODE.sub(linked, text)


def _from_root(address: str, target: str) -> str:
    """Returns the address in the site of what a page of docs/ links to."""
    parts = [*address.split("/")[:-1]]
    for part in target.split("/"):
        if part == "..":
            # Above docs/ is the root, whose README and skills are in the site too.
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    path = "/".join(parts)
    return _COPIED.get(path, path)


def _copied(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return text.replace("](docs/", "](")


def _concepts() -> str:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    sections = {part.split("\n", 1)[0]: part for part in parts[1:]}
    picture = parts[0].split("\n", 1)[1]
    chosen = [f"## {sections[name]}" for name in ("Why it is built like this", "Glossary")]
    return "\n".join(["# Concepts", picture, *chosen])


def reference() -> str:
    """Returns the reference of all operations, made from their request models."""
    head = (
        "# Reference\n\nEvery operation is an MCP tool and a command of the same words, and both "
        "take the same fields. The keys of config.yml are in [its own page]"
        "(skills/distillation-config/SKILL.md).\n"
    )
    return "\n".join([head, *map(_operation, OPERATIONS)])


def _operation(operation: Operation) -> str:
    facts = [
        "writes nothing" if operation.is_read_only else "writes in the workspace",
        *(["starts a run"] if operation.starts_run else []),
        *(["becomes a run where files are large"] if operation.may_become_run else []),
        *(["may reach beyond this machine"] if operation.is_open_world else []),
    ]
    positional = "".join(f" {name.upper()}" for name in operation.positional)
    rows = [_field(name, field) for name, field in operation.request.model_fields.items()]
    return "\n".join(
        [
            f"## `{operation.name}`\n",
            f"{operation.description}\n",
            f"`stillroom {operation.command}{positional}` · {', '.join(facts)}\n",
            *(["| field | type | default | meaning |", "|---|---|---|---|", *rows] if rows else []),
            "",
        ]
    )


def _field(name: str, field: FieldInfo) -> str:
    default = "**required**"
    if not field.is_required():
        value = field.get_default(call_default_factory=True)
        default = "" if value in (None, (), [], {}) else f"`{value}`"
    text = " ".join((field.description or "").split())
    return f"| `{name}` | {_kind(field.annotation)} | {default} | {_cell(text)} |"


def _kind(annotation: Any) -> str:
    """Returns a type in words, such as "whole number" or its choices."""
    plain = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    if annotation in plain:
        return plain[annotation]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) in (tuple, list):
        inner = [kind for kind in get_args(annotation) if kind is not Ellipsis]
        return f"list of {_kind(inner[0])}" if inner else "list"
    kinds = [k for k in get_args(annotation) if k is not type(None)]
    if kinds and get_origin(annotation) is not dict and not hasattr(annotation, "__metadata__"):
        return " or ".join(dict.fromkeys(_kind(kind) for kind in kinds))
    if hasattr(annotation, "__metadata__"):
        return _kind(kinds[0])
    return "object"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;")


@dataclass(frozen=True, slots=True)
class Message:
    """An error of the engine or server: what it says and what to do, with … for what varies."""

    package: str
    problem: str
    fix: str


@functools.cache
def messages() -> frozenset[Message]:
    """Returns the errors that the code raises with both texts written in place."""
    found: set[Message] = set()
    for root in ("engine/stillroom", "server/stillroom_mcp"):
        for path in sorted((ROOT / root).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            # Parsing all files would take five seconds.
            if "templates" in path.parts or "Error(" not in text:
                continue
            package = path.relative_to(ROOT / root).parts[0].removesuffix(".py")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and _is_error(node.func) and len(node.args) == 2:
                    problem, fix = map(_template, node.args)
                    if problem and fix and len(problem.strip("… ")) > 8:
                        found.add(Message(package, problem, fix))
    return frozenset(found)


def _is_error(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id.endswith("Error")


def _template(node: ast.expr) -> str:
    """Returns the text of a string in the code, with … for its values; "" where it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_template(node.left) or "…") + (_template(node.right) or "…")
    return ""


def troubleshooting() -> str:
    """Returns the page of errors with what to do: all whose words stand where they are raised."""
    lines = [
        "# Errors",
        "",
        _TROUBLES,
    ]
    package = ""
    for message in sorted(messages(), key=lambda m: (m.package, m.problem)):
        if message.package != package:
            package = message.package
            lines += ["", f"## {package}", "", "| it says | what to do |", "|---|---|"]
        cells = [_cell(" ".join(text.split())) for text in (message.problem, message.fix)]
        lines.append(f"| {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"

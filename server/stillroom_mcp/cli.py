"""The CLI: each of the server's operations as a command with the same name and options."""

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from stillroom import __version__, api
from stillroom.api import OPERATIONS, Operation, operation_named
from stillroom.errors import EngineError, InputError
from stillroom.fences import printable
from stillroom.settings import open_workspace
from stillroom.validation import describe_errors, did_you_mean
from stillroom_mcp import commands, waiting
from stillroom_mcp.commands import ALL, TOOLSETS, chosen_operations
from stillroom_mcp.fencing import error_for
from stillroom_mcp.other_names import (
    WORKSPACE_FLAGS,
    JoinedEntries,
    add_override_flags,
    hint_for_command,
    hint_for_option,
    short_flag,
    with_short_overrides,
)

_Model = TypeVar("_Model", bound=BaseModel)
EXIT_USAGE = 2
EXIT_PIPE = 141
_ALIASES = {"distil": "run-recipe", "report": "write-report"}
"""Shorter names of commands."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors suggest the closest name and point to `--help`."""

    def error(self, message: str) -> Any:
        hint = ""
        if "invalid choice: '" in message:
            _, _, choices = message.rpartition("(choose from")
            word = message.split("'")[1]
            hint = hint_for_command(word) or did_you_mean(word, re.findall(r"[\w-]+", choices))
        elif message.startswith("unrecognized arguments: "):
            word = message.removeprefix("unrecognized arguments: ").split()[0]
            hint = hint_for_option(word) or did_you_mean(word, sorted(self._option_string_actions))
        short = message.split(" (choose from", maxsplit=1)[0]
        self.exit(EXIT_USAGE, f"{self.prog}: {short}{hint}\nfix: see `{self.prog} --help`\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the CLI and exits with 0 (done), 1 (failed) or 2 (usage error)."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names may contain bytes that are not Unicode.
            stream.reconfigure(errors="backslashreplace")
    code: Any
    try:
        try:
            code = _parse_and_run(argv)
        except SystemExit as exit_:
            code = exit_.code
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Python would raise again when it flushes
        # stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_PIPE
    except EngineError as error:
        code = _print_error(f"error: {error_for(sys.stderr, error)}")
    except OSError as error:
        code = _print_error(
            f"error: operating system error: {error}\n"
            "fix: check free disk space and permissions, then call again"
        )
    except MemoryError:
        code = _print_error(
            "error: out of memory\nfix: close other programs, or work on fewer rows"
        )
    except KeyboardInterrupt:
        _print_error("stopped; a run already started continues (see stillroom list-runs)")
        code = 130
    sys.exit(code)


def _print_error(text: str) -> int:
    # Standard error may be redirected to a disk that is full.
    with suppress(OSError):
        # An error may quote text that contains escape sequences for the terminal.
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()
    return 1


def _parse_and_run(argv: list[str]) -> int:
    argv = _with_command_first(argv)
    parser, by_command = build_parser(argv)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        by_command[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return _run(options)


def _with_command_first(argv: list[str]) -> list[str]:
    """Returns the arguments with the workspace and `--json` after the command that takes them."""
    first: list[str] = []
    match argv:
        case [option, folder, *rest] if option in ("--workspace", *WORKSPACE_FLAGS):
            first = [option, folder]
        case [option, *rest] if option == "--json" or option.startswith("--workspace="):
            first = [option]
        case _:
            return argv
    command, *others = _with_command_first(rest) or [""]
    return [command, *first, *others] if command else argv


def build_parser(
    argv: Sequence[str] = (),
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the parser of the CLI, and the parser of each command by its name.

    Each field of an operation's request is a flag. Some fields may also be positional arguments,
    unless their flag is in `argv`. If `argv` begins with a command, no other gets its flags, which
    take 20 ms.
    """
    parser = _Parser(
        prog="stillroom",
        description="Distil a strong teacher into your own model.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"stillroom {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    by_command: dict[str, argparse.ArgumentParser] = {}
    commands = {*_ALIASES, *(operation.command for operation in OPERATIONS)}
    for operation in OPERATIONS:
        name = operation.command
        text = operation.description
        # argparse expands % in the help of a command, but not in its description.
        escaped_text = text.replace("%", "%%")
        aliases = [alias for alias, command in _ALIASES.items() if command == name]
        sub = subparsers.add_parser(
            name, aliases=aliases, help=escaped_text, description=text, allow_abbrev=False
        )
        by_command |= dict.fromkeys((name, *aliases), sub)
        if argv and argv[0] in commands and argv[0] not in (name, *aliases):
            continue
        _add_fields(sub, operation, argv)
        if "overrides" in operation.request.model_fields:
            add_override_flags(sub)
        _add_common(sub)
        if operation.starts_run or operation.may_become_run:
            sub.add_argument(
                "--detach", action="store_true", help="return immediately; the run continues"
            )
    by_command["serve"] = _add_serve(subparsers)
    by_command["demo"] = _add_demo(subparsers)
    by_command["dashboard"] = _add_dashboard(subparsers)
    by_command["prices"] = _add_prices(subparsers)
    by_command["docs"] = _add_docs(subparsers)
    by_command["wait"] = waiting.add_parser(subparsers)
    by_command["setup"] = _add_setup(subparsers, is_selected="setup" in argv)
    by_command["chat"] = _add_chat(subparsers, is_selected="chat" in argv)
    by_command["record"] = _add_record(subparsers, is_selected="record" in argv)
    return parser, by_command


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workspace",
        *WORKSPACE_FLAGS,
        help="the project's folder (default: this folder)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line")


def _add_serve(subparsers: Any) -> argparse.ArgumentParser:
    text = "Run the MCP server over standard input and output, or over HTTP with --http."
    parser = subparsers.add_parser("serve", help=text, description=text, allow_abbrev=False)
    parser.add_argument("--workspace", help="the project's folder (default: this folder)")
    parser.add_argument(
        "--http", action="store_true", help="serve streamable HTTP to clients that send the token"
    )
    toolsets = "; ".join(f"{name}: {', '.join(tools)}" for name, tools in TOOLSETS.items())
    parser.add_argument(
        "--toolsets",
        nargs="+",
        choices=[*TOOLSETS, ALL],
        default=[ALL],
        metavar="SET",
        help=f"only the tools of these toolsets (default: all). {toolsets}",
    )
    parser.add_argument(
        "--read-only", action="store_true", help="only tools that write nothing and start no run"
    )
    http = parser.add_argument_group("with --http")
    http.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine only)")
    http.add_argument("--port", type=int, help="port, 0 for any free one (default: 8765)")
    http.add_argument(
        "--token-file",
        help="file (mode 0600) with the token (default: $STILLROOM_TOKEN, else a generated token)",
    )
    http.add_argument(
        "--allow-host",
        nargs="*",
        metavar="NAME",
        help="more host names of this server, for example behind a proxy",
    )
    return parser


def _add_demo(subparsers: Any) -> argparse.ArgumentParser:
    text = "Run a complete distillation of small built-in models through the MCP server."
    parser = subparsers.add_parser("demo", help=text, description=text)
    parser.add_argument(
        "folder",
        nargs="?",
        help="new project folder (default: demo-project, or the next free name)",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of all stages (default: 1)")
    parser.add_argument("--smoke", action="store_true", help="a short version of every stage")
    parser.add_argument(
        "--where", help="machine of machines.yml that trains and evaluates (default: this one)"
    )
    return parser


def _add_dashboard(subparsers: Any) -> argparse.ArgumentParser:
    text = "Show runs, rollouts, data and evaluations as live pages, for browsers on this machine."
    parser = subparsers.add_parser("dashboard", help=text, description=text)
    parser.add_argument("--workspace", help="the project's folder (default: this folder)")
    parser.add_argument(
        "--port", type=int, default=8484, help="port to listen on; 0 for any (default: 8484)"
    )
    parser.add_argument("--open", action="store_true", help="open the dashboard in your browser")
    return parser


def _add_chat(subparsers: Any, *, is_selected: bool) -> argparse.ArgumentParser:
    text = "Chat with a model that may call its tools."
    parser = subparsers.add_parser("chat", help=text, description=text, allow_abbrev=False)
    if is_selected:
        # Imported here because no other command needs it.
        from stillroom_mcp import chat

        parser.add_argument("model", help="run id, folder, hub id or name at the provider")
        chat.add_flags(
            parser,
            lambda name, field: parser.add_argument(
                "--" + name.replace("_", "-"), dest=name, **_argument_settings(field)
            ),
        )
    return parser


def _add_setup(subparsers: Any, *, is_selected: bool) -> argparse.ArgumentParser:
    text = "Add the MCP server and the skills to an agent host; shows the changes first."
    parser = subparsers.add_parser("setup", help=text, description=text, allow_abbrev=False)
    if is_selected:
        # Imported here because no other command needs it.
        from stillroom_mcp.host_setup.apply import add_flags

        add_flags(parser)
    return parser


def _add_record(subparsers: Any, *, is_selected: bool) -> argparse.ArgumentParser:
    text = "Record a program's model calls while forwarding them, or replay recorded calls."
    parser = subparsers.add_parser("record", help=text, description=text, allow_abbrev=False)
    if is_selected:
        # Imported here because no other command needs it.
        from stillroom_mcp.http.record import add_flags

        add_flags(parser)
    return parser


def _record(options: argparse.Namespace) -> int:
    from stillroom_mcp.http.record import run

    return run(options)


def _setup(options: argparse.Namespace) -> int:
    from stillroom_mcp.host_setup.apply import run

    return run(options)


def _demo(options: argparse.Namespace) -> int:
    from stillroom_mcp.demo.chain import FULL, SMOKE
    from stillroom_mcp.demo.run import run_demo

    settings = SMOKE if options.smoke else FULL
    return run_demo(options.folder, seed=options.seed, settings=settings, where=options.where)


def _dashboard(options: argparse.Namespace) -> int:
    from stillroom_mcp.dashboard.app import serve_dashboard

    workspace = open_workspace(options.workspace)
    serve_dashboard(workspace, port=options.port, opens_browser=options.open)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from stillroom_mcp import chat

    fields = {k: v for k, v in vars(options).items() if k in ("model", *chat.FLAGS)}
    return chat.run(options, _request(chat.ChatWithModel, "chat", fields))


def _add_prices(subparsers: Any) -> argparse.ArgumentParser:
    text = "Show what models cost per million tokens; --refresh fetches the current list."
    parser = subparsers.add_parser("prices", help=text, description=text, allow_abbrev=False)
    _add_common(parser)
    parser.add_argument("models", nargs="*", help="names at the provider, e.g. gpt-5-mini")
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="fetch OpenRouter's public list into list_prices.yml (no key is sent)",
    )
    return parser


def _add_docs(subparsers: Any) -> argparse.ArgumentParser:
    text = "Print a page of the documentation, or the names of all pages."
    parser = subparsers.add_parser("docs", help=text, description=text, allow_abbrev=False)
    parser.add_argument(
        "page", nargs="?", metavar="PAGE", help="name of a page, e.g. traces for docs/traces.md"
    )
    return parser


def _add_fields(parser: argparse.ArgumentParser, operation: Operation, argv: Sequence[str]) -> None:
    for name, field in operation.request.model_fields.items():
        settings = _argument_settings(field)
        flag, short = "--" + name.replace("_", "-"), short_flag(operation.command, name)
        is_flag = any(word in (flag, short) or word.startswith(f"{flag}=") for word in argv)
        if name in operation.positional and not is_flag:
            settings["help"] += f" (also {flag})"
            is_required = settings.pop("required", False)
            if not is_required:
                settings.setdefault("nargs", "?")
            settings["metavar"] = name.upper()
            parser.add_argument(name, **settings)
        else:
            if name == "entries":
                settings["action"] = JoinedEntries
            flags = (flag,) if short is None else (short, flag)
            parser.add_argument(*flags, dest=name, **settings)


def _argument_settings(field: FieldInfo) -> dict[str, Any]:
    """Returns the argparse settings of a field; the request model converts and checks values."""
    has_default = not field.is_required() and field.default not in (None, ())
    default = f" (default: {field.default})" if has_default else ""
    settings: dict[str, Any] = {
        "help": f"{field.description or ''}{default}".replace("%", "%%").strip(),
        "default": argparse.SUPPRESS,
    }
    kinds = {field.annotation, *get_args(field.annotation)}
    if bool in kinds:
        settings |= {"action": argparse.BooleanOptionalAction}
        return settings
    if field.is_required():
        settings["required"] = True
    if tuple in {getattr(kind, "__origin__", None) for kind in kinds}:
        settings["nargs"] = "*"
    settings["metavar"] = _metavar(field.annotation)
    return settings


def _metavar(annotation: Any) -> str:
    """Returns the placeholder for a value in the help: its choices, N for a number, or TEXT."""
    kinds = [annotation, *get_args(annotation)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return "{" + ",".join(map(str, get_args(kind))) + "}"
    return "N" if {int, float} & set(kinds) else "TEXT"


def _serve(options: argparse.Namespace) -> int:
    names = ("host", "port", "token_file", "allow_host")
    http_options = {name: vars(options)[name] for name in names if vars(options)[name] is not None}
    if http_options and not options.http:
        raise InputError(
            f"--{next(iter(http_options)).replace('_', '-')} is an option of the HTTP server, but "
            "--http is missing",
            "add --http, or leave the option out",
        )
    workspace = open_workspace(options.workspace)
    operations = chosen_operations(options.toolsets, is_read_only=options.read_only)
    if options.http:
        from stillroom_mcp.http.serve import serve_http

        return serve_http(workspace, operations, **http_options)
    from stillroom_mcp.app import build_server

    build_server(workspace, operations).run("stdio")
    return 0


def _prices(options: argparse.Namespace) -> int:
    workspace = open_workspace(options.workspace)
    return commands.print_prices(
        workspace, options.models, is_refreshed=options.refresh, as_json=options.json
    )


_MORE_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "chat": _chat,
    "dashboard": _dashboard,
    "demo": _demo,
    "docs": lambda options: commands.print_docs(options.page),
    "prices": _prices,
    "record": _record,
    "serve": _serve,
    "setup": _setup,
    "wait": waiting.run,
}


def _run(options: argparse.Namespace) -> int:
    if (run := _MORE_COMMANDS.get(options.command)) is not None:
        return run(options)
    return _run_operation(options.command, options)


def _run_operation(command: str, options: argparse.Namespace) -> int:
    operation = operation_named(_ALIASES.get(command, command).replace("-", "_"))
    fields = {k: v for k, v in vars(options).items() if k in operation.request.model_fields}
    fields = with_short_overrides(fields, options)
    request = _request(operation.request, operation.command, fields)
    workspace = open_workspace(options.workspace)
    if isinstance(request, api.ImportRollouts):
        request = api.with_standard_input(workspace, request, sys.stdin.buffer)
    wait = not getattr(options, "detach", True)
    return commands.run_operation(workspace, operation, request, as_json=options.json, wait=wait)


def _request(model: type[_Model], name: str, fields: dict[str, Any]) -> _Model:
    """Returns the validated request of a command; exits with usage help if it is invalid."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        problems = describe_errors(error, model)
        sys.stderr.write(f"stillroom {name}: {problems}\nfix: see `stillroom {name} --help`\n")
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()

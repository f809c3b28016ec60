"""The command line, which offers the server's operations under the same names and options."""

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
from stillroom.validation import describe_errors, nearest
from stillroom_mcp import commands, waiting
from stillroom_mcp.other_names import (
    WORKSPACE_FLAGS,
    JoinedEntries,
    add_override_flags,
    hint_for_command,
    hint_for_option,
    short_flag,
    with_short_overrides,
)
from stillroom_mcp.toolsets import ALL, TOOLSETS, chosen_operations

_Model = TypeVar("_Model", bound=BaseModel)
EXIT_USAGE = 2
EXIT_PIPE = 141


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors suggest the nearest known name and point to `--help`."""

    def error(self, message: str) -> Any:
        hint = ""
        if "invalid choice: '" in message:
            _, _, choices = message.rpartition("(choose from")
            given = message.split("'")[1]
            hint = hint_for_command(given) or nearest(given, re.findall(r"[\w-]+", choices))
        elif message.startswith("unrecognized arguments: "):
            given = message.removeprefix("unrecognized arguments: ").split()[0]
            hint = hint_for_option(given) or nearest(given, sorted(self._option_string_actions))
        short = message.split(" (choose from", maxsplit=1)[0]
        self.exit(EXIT_USAGE, f"{self.prog}: {short}{hint}\nfix: see `{self.prog} --help`\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with 0 (done), 1 (failed) or 2 (wrong usage)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The name of a file need not be Unicode.
            stream.reconfigure(errors="backslashreplace")
    code: Any
    try:
        try:
            code = _parse_and_run(given)
        except SystemExit as ending:
            code = ending.code
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe, as `head` does. Python would raise again when it flushes
        # stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_PIPE
    except EngineError as error:
        code = _failed(f"error: {error}")
    except OSError as error:
        code = _failed(
            f"error: operating system error: {error}\n"
            "fix: check free disk space and permissions, then call again"
        )
    except MemoryError:
        code = _failed("error: out of memory\nfix: close other programs, or work on fewer rows")
    except KeyboardInterrupt:
        _failed("stopped; a run already started continues (see stillroom list-runs)")
        code = 130
    sys.exit(code)


def _failed(text: str) -> int:
    # Standard error may be on the disk that is full.
    with suppress(OSError):
        # What an error quotes must not steer the terminal.
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()
    return 1


def _parse_and_run(given: list[str]) -> int:
    parser, by_command = build_parser(given)
    options, unknown = parser.parse_known_args(given)
    if unknown:
        by_command[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return _run(options)


def build_parser(
    given: Sequence[str] = (),
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the parser of the whole command line, and each command's parser by its name.

    Each field of an operation is a flag of its name. Some can be given without it too; of these,
    the ones whose flag is in `given` are flags only.
    """
    parser = _Parser(
        prog="stillroom",
        description="Distil a strong teacher into your own model.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"stillroom {__version__}")
    added = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    by_command: dict[str, argparse.ArgumentParser] = {}
    for operation in OPERATIONS:
        name = operation.command
        text = operation.description
        # argparse expands % in the help of a command, but not in its description.
        listed = text.replace("%", "%%")
        sub = added.add_parser(name, help=listed, description=text, allow_abbrev=False)
        _add_fields(sub, operation, given)
        if "overrides" in operation.request.model_fields:
            add_override_flags(sub)
        _add_common(sub)
        if operation.starts_run or operation.may_become_run:
            sub.add_argument(
                "--detach", action="store_true", help="return at once; the run continues"
            )
        by_command[name] = sub
    by_command["serve"] = _add_serve(added)
    by_command["demo"] = _add_demo(added)
    by_command["dashboard"] = _add_dashboard(added)
    by_command["report"] = _add_report(added)
    by_command["prices"] = _add_prices(added)
    by_command["docs"] = _add_docs(added)
    by_command["wait"] = waiting.add_parser(added)
    by_command["setup"] = _add_setup(added, is_given="setup" in given)
    by_command["chat"] = _add_chat(added, is_given="chat" in given)
    by_command["record"] = _add_record(added, is_given="record" in given)
    return parser, by_command


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workspace",
        *WORKSPACE_FLAGS,
        help="folder that holds the project (default: this folder)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line")


def _add_serve(added: Any) -> argparse.ArgumentParser:
    text = "Run the MCP server on standard input and output, or with --http at an address."
    parser = added.add_parser("serve", help=text, description=text, allow_abbrev=False)
    parser.add_argument("--workspace", help="folder that holds the project (default: this folder)")
    parser.add_argument(
        "--http", action="store_true", help="serve streamable HTTP, to callers with the token"
    )
    sets = "; ".join(f"{name}: {', '.join(tools)}" for name, tools in TOOLSETS.items())
    parser.add_argument(
        "--toolsets",
        nargs="+",
        choices=[*TOOLSETS, ALL],
        default=[ALL],
        metavar="SET",
        help=f"only the tools of these sets (default: all). {sets}",
    )
    parser.add_argument(
        "--read-only", action="store_true", help="only tools that write nothing and start no run"
    )
    http = parser.add_argument_group("with --http")
    http.add_argument("--host", help="address to listen at (default: 127.0.0.1, this machine only)")
    http.add_argument("--port", type=int, help="port, 0 for any free one (default: 8765)")
    http.add_argument(
        "--token-file",
        help="file (mode 0600) with the token (default: $STILLROOM_TOKEN, or one made and kept)",
    )
    http.add_argument(
        "--allow-host",
        nargs="*",
        metavar="NAME",
        help="other host names that lead here, as behind a proxy",
    )
    return parser


def _add_demo(added: Any) -> argparse.ArgumentParser:
    text = "Run a whole distillation on the embedded world, through the MCP server."
    parser = added.add_parser("demo", help=text, description=text)
    parser.add_argument(
        "folder", nargs="?", help="new project folder (default: demo-project, or the next free one)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of all stages (default: 1)")
    parser.add_argument("--smoke", action="store_true", help="a short version of every stage")
    parser.add_argument(
        "--where", help="machine of machines.yml that trains and evaluates (default: this one)"
    )
    return parser


def _add_dashboard(added: Any) -> argparse.ArgumentParser:
    text = (
        "Show runs, rollouts, data and evaluations as live pages, to this machine's browser only."
    )
    parser = added.add_parser("dashboard", help=text, description=text)
    parser.add_argument("--workspace", help="folder that holds the project (default: this folder)")
    parser.add_argument(
        "--port", type=int, default=8484, help="port to listen on; 0 for any (default: 8484)"
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    return parser


def _add_chat(added: Any, *, is_given: bool) -> argparse.ArgumentParser:
    text = "Talk with a model and its tools, to try what it does."
    parser = added.add_parser("chat", help=text, description=text, allow_abbrev=False)
    if is_given:
        # Imported here, since no other command needs it.
        from stillroom_mcp import chat

        parser.add_argument("model", help="run id, folder, hub id or name at the provider")
        chat.add_flags(
            parser,
            lambda name, field: parser.add_argument(
                "--" + name.replace("_", "-"), dest=name, **_argument_settings(field)
            ),
        )
    return parser


def _add_setup(added: Any, *, is_given: bool) -> argparse.ArgumentParser:
    text = "Add the MCP server and the skills to an agent host; shows the difference first."
    parser = added.add_parser("setup", help=text, description=text, allow_abbrev=False)
    if is_given:
        # Imported here, since no other command needs it.
        from stillroom_mcp.host_setup.apply import add_flags

        add_flags(parser)
    return parser


def _add_record(added: Any, *, is_given: bool) -> argparse.ArgumentParser:
    text = "Pass a program's model calls on to their endpoint and record them, or replay them."
    parser = added.add_parser("record", help=text, description=text, allow_abbrev=False)
    if is_given:
        # Imported here, since no other command needs it.
        from stillroom_mcp.http.record import add_flags

        add_flags(parser)
    return parser


def _record(options: argparse.Namespace) -> int:
    from stillroom_mcp.http.record import run

    return run(options)


def _setup(options: argparse.Namespace) -> int:
    from stillroom_mcp.host_setup.apply import run

    return run(options)


def _chat(options: argparse.Namespace) -> int:
    from stillroom_mcp import chat

    given = {k: v for k, v in vars(options).items() if k in ("model", *chat.FLAGS)}
    return chat.run(options, _request(chat.ChatWithModel, "chat", given))


def _add_prices(added: Any) -> argparse.ArgumentParser:
    text = "Show what models cost per million tokens; --refresh fetches the current list."
    parser = added.add_parser("prices", help=text, description=text, allow_abbrev=False)
    _add_common(parser)
    parser.add_argument("models", nargs="*", help="names at the provider, e.g. gpt-5-mini")
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="fetch OpenRouter's public list into list_prices.yml (no key is sent)",
    )
    return parser


def _add_docs(added: Any) -> argparse.ArgumentParser:
    text = "Print a page of the documentation, or the names of all; `docs/x.md` is the page x."
    parser = added.add_parser("docs", help=text, description=text, allow_abbrev=False)
    parser.add_argument("page", nargs="?", metavar="PAGE", help="name of a page, e.g. traces")
    return parser


def _add_report(added: Any) -> argparse.ArgumentParser:
    text = "Write report.html: learning curves, accuracy, example conversations of all runs."
    parser = added.add_parser("report", help=text, description=text)
    _add_common(parser)
    parser.add_argument("--output", default="report.html", help="page to write")
    parser.add_argument("--png", action="store_true", help="also as a picture, next to the page")
    parser.add_argument(
        "--overwrite", action="store_true", help="also replace what stillroom did not write"
    )
    return parser


def _add_fields(
    parser: argparse.ArgumentParser, operation: Operation, given: Sequence[str]
) -> None:
    for name, field in operation.request.model_fields.items():
        settings = _argument_settings(field)
        flag, short = "--" + name.replace("_", "-"), short_flag(operation.command, name)
        is_flag = any(word in (flag, short) or word.startswith(f"{flag}=") for word in given)
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
    """Returns the argparse settings for a field; the request model converts and checks values."""
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
    """Returns the help's placeholder for a value: its choices, N for a number, otherwise TEXT."""
    kinds = [annotation, *get_args(annotation)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return "{" + ",".join(map(str, get_args(kind))) + "}"
    return "N" if {int, float} & set(kinds) else "TEXT"


_OTHERS: dict[str, Callable[[argparse.Namespace], int]] = {
    "chat": _chat,
    "docs": lambda options: commands.docs(options.page),
    "record": _record,
    "setup": _setup,
    "wait": waiting.run,
}


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "serve":
            return _serve(options)
        case "demo":
            return commands.demo(
                options.folder, seed=options.seed, is_smoke=options.smoke, where=options.where
            )
        case "dashboard":
            workspace = open_workspace(options.workspace)
            return commands.dashboard(workspace, port=options.port, is_opened=options.open)
        case "report":
            workspace = open_workspace(options.workspace)
            given = {"output": options.output, "overwrite": options.overwrite, "png": options.png}
            return commands.report(workspace, api.WriteReport(**given), as_json=options.json)
        case "prices":
            return commands.prices(
                open_workspace(options.workspace),
                options.models,
                is_refreshed=options.refresh,
                as_json=options.json,
            )
        case command if (run := _OTHERS.get(command)) is not None:
            return run(options)
        case command:
            return _run_operation(command, options)


def _serve(options: argparse.Namespace) -> int:
    names = ("host", "port", "token_file", "allow_host")
    given = {name: vars(options)[name] for name in names if vars(options)[name] is not None}
    if given and not options.http:
        raise InputError(
            f"--{next(iter(given)).replace('_', '-')} is for a server over HTTP, and this one "
            "speaks over standard input and output",
            "add --http, or leave the option out",
        )
    workspace = open_workspace(options.workspace)
    offered = chosen_operations(options.toolsets, is_read_only=options.read_only)
    if options.http:
        return commands.serve_http(workspace, offered, **given)
    return commands.serve(workspace, offered)


def _run_operation(command: str, options: argparse.Namespace) -> int:
    operation = operation_named(command.replace("-", "_"))
    given = {k: v for k, v in vars(options).items() if k in operation.request.model_fields}
    given = with_short_overrides(given, options)
    request = _request(operation.request, operation.command, given)
    workspace = open_workspace(options.workspace)
    if isinstance(request, api.ImportRollouts):
        request = api.with_standard_input(workspace, request, sys.stdin.buffer)
    is_waiting = not getattr(options, "detach", True)
    return commands.operate(
        workspace, operation, request, as_json=options.json, is_waiting=is_waiting
    )


def _request(model: type[_Model], name: str, given: dict[str, Any]) -> _Model:
    """Returns the checked request of a command; ends the program if it is faulty."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        faults = describe_errors(error, model)
        sys.stderr.write(f"stillroom {name}: {faults}\nfix: see `stillroom {name} --help`\n")
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()

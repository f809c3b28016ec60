"""The command `stillroom record`: a proxy that records model calls, or replays them."""

import argparse
import json
import math
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from stillroom.api.recorders import budget_of_calls, cost_at_start, write_cost
from stillroom.api.spending import limit_budget, one_start_at_a_time
from stillroom.errors import InputError
from stillroom.recording.admission import Admission
from stillroom.recording.journal import CallJournal
from stillroom.recording.proxy import MAX_RECORDED_BYTES, RecordingProxy
from stillroom.recording.replay import Replay
from stillroom.recording.serving import run_until_stopped
from stillroom.recording.spending import CallBudget
from stillroom.recording.tape import Tape
from stillroom.recording.upstreams import Upstream, check_no_loop, client_settings, parse_upstreams
from stillroom.secrecy.keys import is_loopback
from stillroom.settings import Workspace, open_workspace
from stillroom.teachers.budget import Cost
from stillroom.teachers.pricing import FREE, workspace_budget_usd
from stillroom.teachers.providers import PROVIDERS
from stillroom_mcp.http.listening import (
    TOKEN_VARIABLE,
    ServerToken,
    address_of,
    listening_socket,
    server_token,
)

_PORT = 8788
_NO_TOKEN = ServerToken("", "", is_generated=True)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument("--workspace", help="the project's folder (default: this folder)")
    parser.add_argument(
        "--upstream", nargs="+", action="extend", default=[], metavar="WHERE",
        help=f"where calls are forwarded: {', '.join(PROVIDERS)}, a URL, or "
        "NAME=URL; with several, /NAME before the path chooses one",
    )  # fmt: skip
    parser.add_argument(
        "--output", default="traces", help="folder of the journal (default: traces)"
    )
    parser.add_argument(
        "--replay", nargs="+", metavar="PATH",
        help="answer from these recorded folders or files instead of calling an upstream",
    )  # fmt: skip
    parser.add_argument(
        "--max-body-mb", type=int, default=MAX_RECORDED_BYTES >> 20, metavar="N",
        help="how much of a request or reply is recorded; all of it is forwarded "
        f"(default: {MAX_RECORDED_BYTES >> 20})",
    )  # fmt: skip
    parser.add_argument(
        "--budget-usd", type=float, metavar="USD",
        help="spending cap in US dollars for all calls recorded in this folder, including earlier "
        "ones; further calls are refused",
    )  # fmt: skip
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=_PORT, help=f"port, 0 for any free one (default: {_PORT})"
    )
    parser.add_argument("--token-file", help="file (mode 0600) with a token that callers must send")
    parser.add_argument(
        "--allow-host", nargs="*", default=[], metavar="NAME",
        help="more host names of this proxy, such as host.docker.internal",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Records or replays calls until the process gets SIGINT or SIGTERM."""
    workspace = open_workspace(options.workspace)
    if options.max_body_mb < 1:
        raise InputError(
            f"--max-body-mb {options.max_body_mb} is less than 1", "give 1 or more, or leave it out"
        )
    token = _token(options.token_file)
    admission = Admission(token.value or None, frozenset(map(str.lower, options.allow_host)))
    if options.replay:
        return _replay(workspace, options, token, admission)
    if not options.upstream:
        raise InputError(
            "no upstream was given, so calls cannot be forwarded",
            "give --upstream openai, anthropic, openrouter or a URL; or --replay with a folder",
        )
    return _record(workspace, options, token, admission)


def _token(file: str | None) -> ServerToken:
    """Returns the token that the user gave; without one, callers need no token."""
    is_given = file is not None or os.environ.get(TOKEN_VARIABLE, "").strip()
    return server_token(file) if is_given else _NO_TOKEN


def _record(
    workspace: Workspace, options: argparse.Namespace, token: ServerToken, admission: Admission
) -> int:
    upstreams = parse_upstreams(options.upstream)
    folder = workspace.writable(options.output, label="output")
    secrets = [*workspace.redactor().secrets, *([token.value] if token.value else [])]
    with listening_socket(options.host, options.port, token) as listener:
        check_no_loop(upstreams, listener)
        is_local = all(is_loopback(upstream.host) for upstream in upstreams)
        recording = limited_recording(workspace, folder, options.budget_usd, is_local=is_local)
        with recording as (journal, budget):
            _announce(address_of(listener), upstreams, workspace.shown(folder), token)
            proxy = RecordingProxy(
                journal, upstreams, admission,
                secrets=secrets, max_recorded_bytes=options.max_body_mb << 20, budget=budget,
            )  # fmt: skip
            run_until_stopped(proxy, listener)
    cost = f"; {_spending_text(budget)}" if budget is not None else ""
    sys.stderr.write(f"recorded {journal.num_calls} calls in {workspace.shown(folder)}{cost}\n")
    return 0


@contextmanager
def limited_recording(
    workspace: Workspace, folder: Path, usd: float | None, *, is_local: bool
) -> Generator[tuple[CallJournal, CallBudget | None]]:
    """Yields a folder's journal and the budget for its calls, part of the workspace's budget.

    usd: the budget that the user gave, if any. is_local: whether all upstreams are on
    this machine. Raises InputError if nothing is left of the workspace's budget.
    """
    if usd is not None and not usd > 0:
        raise InputError(
            f"--budget-usd {usd:g} is not above 0", "give an amount such as 5, or leave it out"
        )
    with ExitStack() as stack:
        with one_start_at_a_time(workspace, None):
            cost = cost_at_start(workspace, folder)
            journal = CallJournal(folder)
            stack.callback(journal.close)
            write_cost(workspace, cost)
            budget = None
            is_limited = usd is not None or workspace_budget_usd(workspace) is not None
            if is_limited or cost.spent_usd is not None:
                is_free = usd is None and is_local
                call_budget = budget_of_calls(workspace, folder, unlisted=FREE if is_free else None)
                call_budget.budget.spent += Cost(usd=cost.in_flight_usd)
                cost = cost.recounted(call_budget.budget.spent.usd)
                write_cost(workspace, cost)
                if is_limited:
                    _set_limit(workspace, call_budget, usd, is_free=is_free)
                    budget = call_budget
            # A budget that is already spent allows no further calls.
            budget_usd = budget and max(budget.budget.spent.usd, budget.budget.usd)
            active = msgspec.structs.replace(cost, spent_usd=None, budget_usd=budget_usd)
            write_cost(workspace, active)
        if budget is not None:
            # Added to what earlier recorders had in flight when they were killed.
            budget.budget.on_outstanding = lambda outstanding: write_cost(
                workspace,
                msgspec.structs.replace(
                    active, in_flight_usd=cost.in_flight_usd + outstanding.worst.usd
                ),
            )
        try:
            yield journal, budget
        finally:
            # Before the journal is closed, which allows another recorder to start.
            if budget is not None:
                # A call that is not settled may still be billed.
                spent = budget.budget.spent + budget.budget.reserved
                write_cost(workspace, msgspec.structs.replace(cost, spent_usd=spent.usd))


def _set_limit(
    workspace: Workspace, call_budget: CallBudget, usd: float | None, *, is_free: bool
) -> None:
    """Sets the limit of a folder's budget, which counts the calls so far.

    is_free: whether only free calls are forwarded.
    """
    spent_usd = call_budget.budget.spent.usd
    if is_free:
        # Nothing is reserved for servers of this machine, so only free calls are forwarded.
        call_budget.budget.usd, call_budget.is_free = spent_usd, True
    else:
        limit_usd, notes = limit_budget(workspace, usd, earlier_usd=spent_usd)
        call_budget.budget.usd = limit_usd or math.inf
        sys.stderr.write("".join(f"{note}\n" for note in notes))
    unpriced = (
        f" ({call_budget.num_unpriced} calls have no known price)"
        if call_budget.num_unpriced
        else ""
    )
    sys.stderr.write(f"{_spending_text(call_budget)}{unpriced}\n")


def _spending_text(budget: CallBudget) -> str:
    spent, usd = budget.budget.spent.usd, budget.budget.usd
    return f"the calls in this folder have cost ${spent:.4g} of ${usd:g}"


def _replay(
    workspace: Workspace, options: argparse.Namespace, token: ServerToken, admission: Admission
) -> int:
    if options.upstream:
        raise InputError(
            "--replay calls no upstream, but --upstream was given too",
            "give only one of the two",
        )
    tape = Tape([workspace.existing(name, label="replay") for name in options.replay])
    with listening_socket(options.host, options.port, token) as listener:
        address = address_of(listener)
        shown_address = f"{address}/token/TOKEN" if token.value else address
        left_out = f" ({tape.num_left_out} more cannot be replayed)" if tape.num_left_out else ""
        sys.stderr.write(
            f"replaying {tape.num_calls} recorded calls{left_out}; no call is forwarded\n"
            f"  OpenAI clients: base_url={shown_address}/v1 (OPENAI_BASE_URL)\n"
            f"  Anthropic clients: base_url={shown_address} (ANTHROPIC_BASE_URL)\n"
            f"{_token_line(token)}stop with Ctrl-C\n"
        )
        sys.stderr.flush()
        _print_json(
            {
                "replaying": address,
                "calls": tape.num_calls,
                "token": token.source or None,
                "openai_base_url": f"{address}/v1",
                "anthropic_base_url": address,
            }
        )
        run_until_stopped(Replay(tape, admission), listener)
    return 0


def _token_line(token: ServerToken) -> str:
    if not token.value:
        return ""
    return f"TOKEN is the token in {token.source}; or send it in the header x-stillroom-token\n"


def _print_json(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _announce(address: str, upstreams: Sequence[Upstream], folder: str, token: ServerToken) -> None:
    """Prints the settings for client programs: one line of JSON, and text on standard error."""
    is_only = len(upstreams) == 1
    shown_address = f"{address}/token/TOKEN" if token.value else address
    upstream_lines: list[dict[str, Any]] = []
    for upstream in upstreams:
        settings = client_settings(upstream, address, is_alone=is_only)
        printed = client_settings(upstream, shown_address, is_alone=is_only)
        sys.stderr.write(
            f"{upstream.name}: calls go to {upstream.origin}\n"
            f"  OpenAI clients: base_url={printed.openai} (OPENAI_BASE_URL)\n"
            f"  Anthropic clients: base_url={printed.anthropic} (ANTHROPIC_BASE_URL)\n"
        )
        upstream_lines.append(
            {
                "name": upstream.name,
                "upstream": upstream.origin,
                "openai_base_url": settings.openai,
                "anthropic_base_url": settings.anthropic,
            }
        )
    sys.stderr.write(f"{_token_line(token)}recording into {folder}; stop with Ctrl-C\n")
    sys.stderr.flush()
    line = {"recording": address, "output": folder, "token": token.source or None}
    _print_json({**line, "upstreams": upstream_lines})

"""check_setup with `where`: what another machine has and lacks, each lack with what to do."""

from collections.abc import Callable, Iterator

from stillroom import __version__
from stillroom.errors import EngineError
from stillroom.models.resolve import locate_model
from stillroom.projects.setup import Check, CheckSetup, SetupReport
from stillroom.remote.host import RunHost, UnreachableError
from stillroom.remote.hosts import open_host
from stillroom.remote.machine import Machine
from stillroom.remote.machine_list import ask_all
from stillroom.remote.machines import check_keys_may_go, find_machine
from stillroom.remote.records import MachineFacts
from stillroom.settings import Workspace
from stillroom.teachers.providers import IN_PROCESS, endpoint_for

_LOW_DISK_GB = 20.0
"""torch and what it needs take some 8 GB; models and checkpoints come on top."""
_LEAST_PYTHON = (3, 11)
_CLOCK_S = 60.0
_UV = "curl -LsSf https://astral.sh/uv/install.sh | sh"


def check_machine(
    workspace: Workspace,
    request: CheckSetup,
    where: str,
    *,
    opened: Callable[[Machine], RunHost] = open_host,
) -> SetupReport:
    """Asks a machine and returns what it has and lacks; nothing is changed or brought up there.

    Raises InputError if no machine has this name.
    """
    machine = find_machine(workspace, where)
    checks = [_machine_check(machine)]
    if machine.access.can_be_probed:
        answer = ask_all(workspace, [machine], opened)[machine.name]
        is_up = isinstance(answer, MachineFacts)
        checks += _answer_checks(machine, answer) if is_up else [_silence(machine, answer)]
    checks += _requested_checks(workspace, request, machine)
    return SetupReport(ready=all(check.status != "missing" for check in checks), checks=checks)


def _machine_check(machine: Machine) -> Check:
    detail = f"{machine.access.kind} {machine.access.summary}, from {machine.file}"
    if machine.price_per_hour is None and not machine.access.is_provisioned:
        return Check(
            name="machine",
            status="note",
            detail=f"{detail}; its price is not known",
            fix="give price_per_hour there if it costs by the hour: budgets then hold",
        )
    price = machine.price_per_hour
    cost = f"; ${price:g} an hour" if price is not None else "; its provider says the price"
    return Check(name="machine", status="ok", detail=detail + cost)


def _silence(machine: Machine, error: EngineError) -> Check:
    """Returns the check of a machine that did not answer."""
    if machine.access.is_provisioned and isinstance(error, UnreachableError):
        return Check(
            name="connection",
            status="note",
            detail=f"it is not up: {error.problem}",
            fix="nothing: a run brings it up, and it is put down afterwards",
        )
    return Check(name="connection", status="missing", detail=error.problem, fix=error.fix)


def _answer_checks(machine: Machine, facts: MachineFacts) -> Iterator[Check]:
    yield Check(name="connection", status="ok", detail=f"it answers: {facts.system}")
    yield _gpu_check(facts)
    if facts.python is None and machine.access.is_provisioned:
        return  # It is not up: what it will have is its provider's affair.
    yield _python_check(machine, facts)
    yield _disk_check(machine, facts)
    yield _code_check(facts)
    if facts.clock_ahead_s is not None and abs(facts.clock_ahead_s) > _CLOCK_S:
        detail = f"its clock is {facts.clock_ahead_s:+.0f} s off this one"
        yield Check(name="clock", status="note", detail=f"{detail}; runs do not go by it")


def _python_check(machine: Machine, facts: MachineFacts) -> Check:
    if facts.python is not None and _is_new_enough(facts.python_version):
        detail = f"{facts.python} ({facts.python_version})"
        return Check(name="python", status="ok", detail=detail)
    found = f"{facts.python_version} at {facts.python}" if facts.python else "none"
    needed = ".".join(map(str, _LEAST_PYTHON))
    if facts.has_uv and machine.python is None:
        detail = f"found: {found}; uv brings one of {needed} or newer at the first start"
        return Check(name="python", status="ok", detail=detail)
    if machine.python is not None:
        detail = f"`python: {machine.python}` does not run there as Python {needed} or newer"
        return Check(
            name="python",
            status="missing",
            detail=detail + (f": it is {facts.python_version}" if facts.python else ""),
            fix=f"give the path of one that does in {machine.file}, or leave `python:` out: then "
            "stillroom looks for one itself",
        )
    return Check(
        name="python",
        status="missing",
        detail=f"Python {needed} or newer is needed, found: {found}",
        fix=f"on {machine.name}: `{_UV}` (uv brings a Python), or name one with `python:` in "
        f"{machine.file}",
    )


def _is_new_enough(version: str | None) -> bool:
    parts = (version or "0.0").split(".")[:2]
    return all(part.isdecimal() for part in parts) and tuple(map(int, parts)) >= _LEAST_PYTHON


def _disk_check(machine: Machine, facts: MachineFacts) -> Check:
    if facts.blocked_folder is not None:
        return Check(
            name="disk",
            status="missing",
            detail=f"{machine.folder} cannot be made: {facts.blocked_folder} is no folder that may "
            "be written to",
            fix=f"name a folder with `folder:` in {machine.file} that its user may write to",
        )
    if facts.free_disk_gb is None:
        return Check(name="disk", status="note", detail="its free space could not be found out")
    detail = f"{facts.free_disk_gb:.0f} GB free for {machine.folder}"
    if facts.free_disk_gb < _LOW_DISK_GB:
        return Check(
            name="disk",
            status="note",
            detail=detail,
            fix=f"free some, or name a folder on a larger disk with `folder:` in {machine.file}: "
            f"packages and models take {_LOW_DISK_GB:g} GB and more",
        )
    return Check(name="disk", status="ok", detail=detail)


def _gpu_check(facts: MachineFacts) -> Check:
    if facts.gpus:
        driver = f"; driver {facts.driver}" if facts.driver else ""
        return Check(name="gpu", status="ok", detail="; ".join(facts.gpus) + driver)
    memory = f", {facts.memory_gb:.0f} GB" if facts.memory_gb is not None else ""
    return Check(
        name="gpu",
        status="note",
        detail=f"none found; {facts.num_processors or '?'} processors{memory}",
        fix="if it has one, its driver is not installed: `nvidia-smi` there must list it",
    )


def _code_check(facts: MachineFacts) -> Check:
    start = f"; a process starts there in {facts.start_s:.1f} s" if facts.start_s else ""
    if facts.has_same_code:
        return Check(name="stillroom", status="ok", detail=f"this very {__version__}{start}")
    if facts.stillroom_version is not None:
        detail = f"{facts.stillroom_version} is there; the next start sends this {__version__}"
        return Check(name="stillroom", status="ok", detail=detail + start)
    return Check(
        name="stillroom",
        status="note",
        detail="not there yet: the first start sends it and installs torch and the rest, which "
        f"takes minutes{start}",
    )


def _requested_checks(
    workspace: Workspace, request: CheckSetup, machine: Machine
) -> Iterator[Check]:
    is_in_process = request.provider in IN_PROCESS
    if (request.provider or request.base_url) is not None and not is_in_process:
        yield _key_check(workspace, request, machine)
    if request.model is not None:
        yield _model_check(workspace, request.model)


def _key_check(workspace: Workspace, request: CheckSetup, machine: Machine) -> Check:
    """Returns whether the teacher's key is set here, and may be handed to the machine."""
    try:
        endpoint = endpoint_for(
            workspace,
            request.provider or "openai",
            base_url=request.base_url,
            api_key_env=request.api_key_env,
        )
        names = [endpoint.api_key_env] if endpoint.api_key_env else []
        check_keys_may_go(workspace, machine, names)
    except EngineError as error:
        return Check(name="teacher key", status="missing", detail=error.problem, fix=error.fix)
    key = f"the key in {names[0]} is handed to its process" if names else "it needs no key"
    return Check(name="teacher key", status="ok", detail=f"{endpoint.base_url}: {key}")


def _model_check(workspace: Workspace, model: str) -> Check:
    try:
        location = locate_model(workspace, model)
    except EngineError as error:
        return Check(name="model", status="missing", detail=error.problem, fix=error.fix)
    way = "sent there, once" if location.is_local else "downloaded there from the hub"
    return Check(name="model", status="ok", detail=f"{model}: {way}")

"""check_setup with `where`: what another machine has and lacks, each lack with what to do."""

from collections.abc import Callable, Iterator

from stillroom import __version__
from stillroom.errors import EngineError, MissingExtraError
from stillroom.models.resolve import locate_model
from stillroom.projects.setup import Check, CheckSetup, SetupReport
from stillroom.remote.host import RunHost, UnreachableError
from stillroom.remote.hosts import open_host
from stillroom.remote.machine import Machine
from stillroom.remote.machine_list import probe_all
from stillroom.remote.machines import check_keys_may_go, find_machine
from stillroom.remote.records import MachineFacts
from stillroom.remote.ssh.probe import MIN_PYTHON
from stillroom.settings import Workspace
from stillroom.teachers.providers import IN_PROCESS, endpoint_for

_LOW_DISK_GB = 20.0
"""torch and what it needs take some 8 GB; models and checkpoints come on top."""
_CLOCK_S = 60.0
_UV = "curl -LsSf https://astral.sh/uv/install.sh | sh"


def check_machine(
    workspace: Workspace,
    request: CheckSetup,
    where: str,
    *,
    opened: Callable[[Machine], RunHost] = open_host,
) -> SetupReport:
    """Probes a machine and returns what it has and lacks; nothing is changed or provisioned.

    Raises InputError if no machine has this name.
    """
    machine = find_machine(workspace, where)
    checks = [_machine_check(machine)]
    if machine.access.can_be_probed:
        answer = probe_all(workspace, [machine], opened)[machine.name]
        if isinstance(answer, MachineFacts):
            checks += _facts_checks(machine, answer)
        else:
            checks.append(_connection_error(machine, answer))
    if (request.provider or request.base_url) and request.provider not in IN_PROCESS:
        checks.append(_key_check(workspace, request, machine))
    if request.model is not None:
        checks.append(_model_check(workspace, request.model))
    return SetupReport(ready=all(check.status != "missing" for check in checks), checks=checks)


def _ok(name: str, detail: str, *, says: str | None = None) -> Check:
    return Check(name=name, status="ok", detail=detail, machine_says=says)


def _note(name: str, detail: str, fix: str | None = None, *, says: str | None = None) -> Check:
    return Check(name=name, status="note", detail=detail, fix=fix, machine_says=says)


def _missing(name: str, detail: str, fix: str, *, says: str | None = None) -> Check:
    return Check(name=name, status="missing", detail=detail, fix=fix, machine_says=says)


def _machine_check(machine: Machine) -> Check:
    detail = f"{machine.access.kind} {machine.access.summary}, from {machine.file}"
    if machine.price_per_hour is not None:
        return _ok("machine", f"{detail}; ${machine.price_per_hour:g} an hour")
    if machine.access.is_provisioned:
        return _ok("machine", f"{detail}; its provider says the price")
    fix = "give price_per_hour in that file if it costs by the hour: budgets then hold"
    return _note("machine", f"{detail}; its price is not known", fix)


def _connection_error(machine: Machine, error: EngineError) -> Check:
    if machine.access.is_provisioned and isinstance(error, UnreachableError):
        fix = "nothing: a run provisions it, and it is released afterwards"
        return _note("connection", "it is not up", fix, says=error.problem)
    if isinstance(error, MissingExtraError):
        return _missing("connection", error.problem, error.fix)
    # What ssh or the machine printed is part of the problem.
    return _missing("connection", "no connection to it", error.fix, says=error.problem)


def _facts_checks(machine: Machine, facts: MachineFacts) -> Iterator[Check]:
    yield _ok("connection", "it answers", says=facts.system)
    yield _gpu_check(facts)
    if facts.python is None and machine.access.is_provisioned:
        return  # It is not up: its provider decides what it will have.
    yield _python_check(machine, facts)
    yield _disk_check(machine, facts)
    yield _code_check(facts)
    if facts.clock_ahead_s is not None and abs(facts.clock_ahead_s) > _CLOCK_S:
        detail = f"its clock is {facts.clock_ahead_s:+.0f} s off this one; runs do not go by it"
        yield _note("clock", detail)


def _python_check(machine: Machine, facts: MachineFacts) -> Check:
    if facts.python is not None and _is_new_enough(facts.python_version):
        return _ok("python", f"Python {facts.python_version}", says=facts.python)
    needed = ".".join(map(str, MIN_PYTHON))
    if machine.python is not None:
        return _missing(
            "python",
            f"`python: {machine.python}` does not run on it as Python {needed} or newer"
            + (f": it is {facts.python_version}" if facts.python else ""),
            f"give the path of one that does in {machine.file}, or leave `python:` out: then "
            "stillroom looks for one itself",
        )
    found = facts.python_version or "none"
    if facts.has_uv:
        return _ok(
            "python", f"found: {found}; uv installs one of {needed} or newer at the first start"
        )
    return _missing(
        "python",
        f"Python {needed} or newer is needed, found: {found}",
        f"on {machine.name}: `{_UV}` (uv installs a Python), or name one with `python:` in "
        f"{machine.file}",
    )


def _is_new_enough(version: str | None) -> bool:
    parts = (version or "0.0").split(".")[:2]
    return all(part.isdecimal() for part in parts) and tuple(map(int, parts)) >= MIN_PYTHON


def _disk_check(machine: Machine, facts: MachineFacts) -> Check:
    if facts.blocked_folder is not None:
        return _missing(
            "disk",
            f"{machine.folder} cannot be made: a folder above it may not be written to",
            f"name a folder with `folder:` in {machine.file} that its user may write to",
            says=facts.blocked_folder,
        )
    if facts.free_disk_gb is None:
        return _note("disk", "its free space could not be found out")
    detail = f"{facts.free_disk_gb:.0f} GB free for {machine.folder}"
    if facts.free_disk_gb >= _LOW_DISK_GB:
        return _ok("disk", detail)
    return _note(
        "disk",
        detail,
        f"free some, or name a folder on a larger disk with `folder:` in {machine.file}: "
        f"packages and models take {_LOW_DISK_GB:g} GB and more",
    )


def _gpu_check(facts: MachineFacts) -> Check:
    if facts.gpus:
        driver = f"; driver {facts.driver}" if facts.driver else ""
        number = f"{len(facts.gpus)} GPUs" if len(facts.gpus) > 1 else "one GPU"
        sizes = sorted({f"{size:g} GB" for size in facts.gpu_memory_gb})
        detail = f"{number}, {' and '.join(sizes)} each" if sizes else number
        return _ok("gpu", detail, says="; ".join(facts.gpus) + driver)
    memory = f", {facts.memory_gb:.0f} GB" if facts.memory_gb is not None else ""
    return _note(
        "gpu",
        f"none found; {facts.num_processors or '?'} processors{memory}",
        "if it has one, its driver is not installed: `nvidia-smi` on it must list it",
    )


def _code_check(facts: MachineFacts) -> Check:
    start = f"; a process starts on it in {facts.start_s:.1f} s" if facts.start_s else ""
    if facts.has_same_code:
        return _ok("stillroom", f"this very {__version__}{start}")
    if facts.stillroom_version is not None:
        detail = f"another version is installed; the next start sends this {__version__}{start}"
        return _ok("stillroom", detail, says=facts.stillroom_version)
    return _note(
        "stillroom",
        "not installed yet: the first start sends it and installs torch and the rest, which takes "
        f"minutes{start}",
    )


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
        return _missing("teacher key", error.problem, error.fix)
    key = f"the key in {names[0]} is handed to its process" if names else "it needs no key"
    return _ok("teacher key", f"{endpoint.base_url}: {key}")


def _model_check(workspace: Workspace, model: str) -> Check:
    try:
        location = locate_model(workspace, model)
    except EngineError as error:
        return _missing("model", error.problem, error.fix)
    way = "sent to it, once" if location.is_local else "downloaded on it from the hub"
    return _ok("model", f"{model}: {way}")

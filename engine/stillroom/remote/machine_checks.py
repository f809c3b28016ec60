"""check_setup with `where`: what another machine has and what it lacks, with a fix for each gap."""

from collections.abc import Callable, Iterator

from stillroom import __version__
from stillroom.errors import EngineError, MissingExtraError
from stillroom.models.resolve import locate_model
from stillroom.projects.setup import Check, CheckSetup, SetupReport
from stillroom.remote.host import RunHost, UnreachableError
from stillroom.remote.hosts import open_host
from stillroom.remote.known_machines import gpu_names
from stillroom.remote.machine import Machine
from stillroom.remote.machine_list import probe_all
from stillroom.remote.machines import check_keys_allowed, find_machine
from stillroom.remote.records import MachineFacts
from stillroom.remote.ssh.probe import MIN_PYTHON
from stillroom.settings import Workspace
from stillroom.teachers.providers import IN_PROCESS, endpoint_for

_LOW_DISK_GB = 20.0
"""torch and its dependencies take some 8 GB; models and checkpoints need more."""
_MAX_CLOCK_OFFSET_S = 60.0
_UV = "curl -LsSf https://astral.sh/uv/install.sh | sh"


def check_machine(
    workspace: Workspace,
    request: CheckSetup,
    where: str,
    *,
    open_machine: Callable[[Machine], RunHost] = open_host,
) -> SetupReport:
    """Probes a machine and returns the checks of it; changes and provisions nothing.

    Raises InputError if no machine has this name.
    """
    machine = find_machine(workspace, where)
    checks = [_machine_check(machine)]
    if machine.access.can_be_probed:
        probed = probe_all(workspace, [machine], open_machine)[machine.name]
        if isinstance(probed, MachineFacts):
            checks += _facts_checks(machine, probed)
        else:
            checks.append(_failed_connection(machine, probed))
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
    """Reports how the machine is reached and what it costs."""
    detail = f"{machine.access.kind} {machine.access.summary}, from {machine.file}"
    if machine.price_per_hour is not None:
        return _ok("machine", f"{detail}; ${machine.price_per_hour:g} an hour")
    if machine.access.is_provisioned:
        return _ok("machine", f"{detail}; priced by its provider")
    fix = "set price_per_hour in that file if the machine is billed by the hour, to enforce budgets"
    return _note("machine", f"{detail}; price unknown", fix)


def _failed_connection(machine: Machine, error: EngineError) -> Check:
    """Returns the check for a machine that could not be probed."""
    if machine.access.is_provisioned and isinstance(error, UnreachableError):
        fix = "no action needed: a run provisions it and releases it afterwards"
        return _note("connection", "the machine is not up", fix, says=error.problem)
    if isinstance(error, MissingExtraError):
        return _missing("connection", error.problem, error.fix)
    # What ssh or the machine printed is part of the problem.
    return _missing("connection", "cannot connect", error.fix, says=error.problem)


def _facts_checks(machine: Machine, facts: MachineFacts) -> Iterator[Check]:
    """Yields the checks of a machine that has answered."""
    yield _ok("connection", "the machine answers", says=facts.system)
    yield _gpu_check(facts)
    if facts.python is None and machine.access.is_provisioned:
        return  # The machine is not up: its provider decides what it will have.
    yield _python_check(machine, facts)
    yield _disk_check(machine, facts)
    yield _code_check(facts)
    if facts.clock_ahead_s is not None and abs(facts.clock_ahead_s) > _MAX_CLOCK_OFFSET_S:
        detail = (
            f"its clock is {facts.clock_ahead_s:+.0f} s off the local clock; runs are not affected"
        )
        yield _note("clock", detail)


def _python_check(machine: Machine, facts: MachineFacts) -> Check:
    """Checks that the machine has a suitable Python, or uv to install one."""
    if facts.python is not None and _is_new_enough(facts.python_version):
        return _ok("python", f"Python {facts.python_version}", says=facts.python)
    needed = ".".join(map(str, MIN_PYTHON))
    if machine.python is not None:
        return _missing(
            "python",
            f"`python: {machine.python}` is not a working Python {needed} or newer on the machine"
            + (f": it is {facts.python_version}" if facts.python else ""),
            f"set `python:` in {machine.file} to the path of such an interpreter, or remove that "
            "line to let stillroom find one",
        )
    version = facts.python_version or "none"
    if facts.has_uv:
        return _ok(
            "python", f"found: {version}; the first run installs Python {needed} or newer with uv"
        )
    return _missing(
        "python",
        f"Python {needed} or newer is needed, found: {version}",
        f"on {machine.name}: `{_UV}` (uv then installs Python), or set `python:` in "
        f"{machine.file} to an interpreter",
    )


def _is_new_enough(version: str | None) -> bool:
    parts = (version or "0.0").split(".")[:2]
    return all(part.isdecimal() for part in parts) and tuple(map(int, parts)) >= MIN_PYTHON


def _disk_check(machine: Machine, facts: MachineFacts) -> Check:
    """Checks that the machine's folder can be created and has enough space."""
    if facts.blocked_folder is not None:
        return _missing(
            "disk",
            f"{machine.folder} cannot be created: a parent folder is not writable",
            f"set `folder:` in {machine.file} to a folder that the machine's user can write to",
            says=facts.blocked_folder,
        )
    if facts.free_disk_gb is None:
        return _note("disk", "its free space could not be determined")
    detail = f"{facts.free_disk_gb:.0f} GB free for {machine.folder}"
    if facts.free_disk_gb >= _LOW_DISK_GB:
        return _ok("disk", detail)
    return _note(
        "disk",
        detail,
        f"free some space, or set `folder:` in {machine.file} to a folder on a larger disk: "
        f"packages and models take {_LOW_DISK_GB:g} GB or more",
    )


def _gpu_check(facts: MachineFacts) -> Check:
    """Reports the machine's GPUs, or notes that it has none."""
    if facts.gpus:
        driver = f"; driver {facts.driver}" if facts.driver else ""
        num_gpus = sum(len(gpu_names(gpu)) for gpu in facts.gpus)
        number = f"{num_gpus} GPUs" if num_gpus > 1 else "one GPU"
        sizes = sorted({f"{size:g} GB" for size in facts.gpu_memory_gb})
        detail = f"{number}, {' and '.join(sizes)} each" if sizes else number
        return _ok("gpu", detail, says="; ".join(facts.gpus) + driver)
    memory = f", {facts.memory_gb:.0f} GB of memory" if facts.memory_gb is not None else ""
    return _note(
        "gpu",
        f"none found; {facts.num_processors or '?'} processors{memory}",
        "if the machine has a GPU, install its driver: `nvidia-smi` must list the GPU",
    )


def _code_check(facts: MachineFacts) -> Check:
    """Reports whether the machine has this version of Stillroom, another one, or none."""
    start = f"; a process starts in {facts.start_s:.1f} s" if facts.start_s else ""
    if facts.has_same_code:
        return _ok("stillroom", f"the same code, {__version__}, is installed{start}")
    if facts.stillroom_version is not None:
        detail = f"another version is installed; the next run sends {__version__}{start}"
        return _ok("stillroom", detail, says=facts.stillroom_version)
    return _note(
        "stillroom",
        "not installed yet: the first run sends it and installs its packages, such as torch, "
        f"which takes minutes{start}",
    )


def _key_check(workspace: Workspace, request: CheckSetup, machine: Machine) -> Check:
    """Checks that the teacher's key is set locally and may be sent to the machine."""
    try:
        endpoint = endpoint_for(
            workspace,
            request.provider or "openai",
            base_url=request.base_url,
            api_key_env=request.api_key_env,
        )
        names = [endpoint.api_key_env] if endpoint.api_key_env else []
        check_keys_allowed(workspace, machine, names)
    except EngineError as error:
        return _missing("teacher key", error.problem, error.fix)
    key = f"the key in {names[0]} is passed to the run's process" if names else "it needs no key"
    return _ok("teacher key", f"{endpoint.base_url}: {key}")


def _model_check(workspace: Workspace, model: str) -> Check:
    """Checks that the model exists, and says how it gets to the machine."""
    try:
        location = locate_model(workspace, model)
    except EngineError as error:
        return _missing("model", error.problem, error.fix)
    transfer = "uploaded once" if location.is_local else "downloaded by the machine from the hub"
    return _ok("model", f"{model}: {transfer}")

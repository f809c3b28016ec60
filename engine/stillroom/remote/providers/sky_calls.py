"""The calls to SkyPilot's Python package that a run needs, and the process that makes them."""

import importlib
import importlib.util
import math
import os
import pickle
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from stillroom import bounds
from stillroom.errors import EngineError, missing_extra
from stillroom.remote.host import UnreachableError
from stillroom.remote.machine import SkyPilotCluster
from stillroom.secrecy.environments import provisioning_environment

_CLI_LIMIT_S = 120
_MAX_CHARS = 600
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HOUR_S = 3600
_CALL_LIMIT_S = float(bounds.PROVIDER_CALL.limit)
_POLL_S = 2.0
_PROGRAMS = (r"[s]tillroom\.remote\.(agent|there)", r"[s]tillroom\.jobs\.keeper")
_CHECK_EVERY_S = 15
_NUM_IDLE_CHECKS = 20
"""The number of consecutive idle checks before the job ends, as reconnecting takes a moment."""

Outcome = Literal["waiting", "succeeded", "failed", "unknown"]
_OUTCOMES: dict[str, Outcome] = {
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "failed",
}


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The status and price of a cluster."""

    status: str
    """UP, INIT, STOPPED or AUTOSTOPPING."""
    price_per_hour: float | None

    @property
    def is_up(self) -> bool:
        """Whether ssh can reach it."""
        return self.status == "UP"

    @property
    def is_stopped(self) -> bool:
        """Whether its processes have exited while its disk is kept."""
        return self.status == "STOPPED"


@dataclass(frozen=True, slots=True)
class Offer:
    """The cheapest machine in the catalogue that matches the request."""

    instance: str
    price_per_hour: float
    gpus: list[str]
    gpu_memory_gb: list[float]
    num_processors: int | None
    memory_gb: float | None


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class SkyCalls:
    """Calls to SkyPilot. `package` is the module `sky` or a compatible object."""

    def __init__(
        self,
        package: Any = None,
        *,
        cli: Callable[[Sequence[str]], None] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cli, self._pause = cli or _run_cli, pause
        self._sky = package if package is not None else _import_sky()

    def launch(self, name: str, cluster: SkyPilotCluster, *, folder: str) -> str:
        """Requests a cluster with autostop; returns the request's id.

        SkyPilot deletes the cluster after `autostop` minutes without a run, even if the local
        machine is down.
        """
        with _convert_errors(self._sky, f"could not request the cluster {name}"):
            task = self._task(run=hold_script(folder))
            task.set_resources(self._resources(cluster))
            return str(
                self._sky.launch(
                    task, cluster_name=name, idle_minutes_to_autostop=cluster.autostop, down=True
                )
            )

    def outcome(self, request_id: str, *, wait_s: float = 0.0) -> Outcome:
        """Returns a request's outcome, after waiting up to `wait_s` for it.

        `unknown` if SkyPilot no longer lists the request.
        """
        waited_s = 0.0
        while True:
            problem = f"could not get the status of SkyPilot request {request_id}"
            with _convert_errors(self._sky, problem):
                requests = self._sky.api_status(request_ids=[request_id], all_status=True)
            status = str(requests[0].status) if requests else None
            outcome = "unknown" if status is None else _OUTCOMES.get(status, "waiting")
            if outcome != "waiting" or waited_s >= wait_s:
                return outcome
            self._pause(_POLL_S)
            waited_s += _POLL_S

    def raise_failure(self, request_id: str, name: str) -> None:
        """Raises the error of a failed request."""
        with _convert_errors(self._sky, f"could not provision the cluster {name}", can_retry=False):
            self._sky.get(request_id)
        raise EngineError(
            f"SkyPilot's request {request_id} for the cluster {name} was cancelled",
            "start the run again; `sky api logs` shows who cancelled it",
        )

    def get_cluster(self, name: str) -> ClusterView | None:
        """Returns a cluster's status from its provider; None if it does not exist."""
        with _convert_errors(self._sky, f"could not get the status of the cluster {name}"):
            mode = self._sky.StatusRefreshMode.AUTO
            records = self._sky.get(self._sky.status(cluster_names=[name], refresh=mode))
        record = next((each for each in records if each["name"] == name), None)
        if record is None:
            return None
        status = str(getattr(record["status"], "value", record["status"]))
        return ClusterView(status, _hourly_price(record.get("handle")))

    def submit_hold_job(self, name: str, *, folder: str) -> None:
        """Submits the job of `hold_script`, which keeps the cluster up while a run is on it."""
        with _convert_errors(self._sky, f"could not start the job that keeps {name} up"):
            task = self._task(run=hold_script(folder))
            self._sky.get(self._sky.exec(task, cluster_name=name))

    def release(self, name: str) -> None:
        """Deletes the cluster if it exists, and returns when it is gone."""
        with _convert_errors(self._sky, f"could not delete the cluster {name}"):
            try:
                self._sky.get(self._sky.down(name))
            except self._sky.exceptions.ClusterDoesNotExist:
                return

    def find_offer(self, cluster: SkyPilotCluster) -> Offer | None:
        """Returns the cheapest machine with the requested accelerators in the user's clouds.

        None if no accelerator is requested, or if no cloud lists a price.
        """
        if (accelerator := cluster.accelerator) is None:
            return None
        name, count = accelerator
        cloud, _, region = str(cluster.resources.get("infra") or "").partition("/")
        cloud = cloud or str(cluster.resources.get("cloud") or "")
        with _convert_errors(self._sky, "could not get prices from SkyPilot"):
            enabled = self._sky.get(self._sky.client.sdk.enabled_clouds())
            if not enabled:
                raise EngineError(
                    "SkyPilot has no access to any cloud",
                    "run `sky check` in a terminal and set up a cloud",
                )
            # Reads the local catalogue, without a request.
            catalogue = self._sky.list_accelerators(
                name_filter=f"^{re.escape(name)}$",
                region_filter=f"^{re.escape(region)}$" if region else None,
                quantity_filter=count,
                clouds=[each.lower() for each in ([cloud] if cloud else enabled)],
                case_sensitive=False,
            )
        is_spot = bool(cluster.resources.get("use_spot"))
        offers = [
            _parse_offer(each, is_spot=is_spot) for items in catalogue.values() for each in items
        ]
        priced = [each for each in offers if each is not None]
        return min(priced, key=lambda each: each.price_per_hour, default=None)

    def write_ssh_entry(self, name: str) -> None:
        """Writes the cluster's entry of the ssh config, with SkyPilot's own command line."""
        self._cli(["status", name])

    def call(
        self,
        method: "Callable[Concatenate[SkyCalls, _Arguments], _Result]",
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Calls a method in this process, unlike `SkyProcess.call`."""
        return method(self, *args, **kwargs)

    def _task(self, *, run: str | None) -> Any:
        return self._sky.Task(name="stillroom", run=run)

    def _resources(self, cluster: SkyPilotCluster) -> Any:
        """Returns the cluster's resources as SkyPilot's object."""
        try:
            return self._sky.Resources.from_yaml_config(dict(cluster.resources))
        except Exception as error:  # SkyPilot raises many types for an invalid key or value.
            raise EngineError(
                f"SkyPilot rejects the resources in machines.yml: {_one_line(str(error))}",
                "fix the machine's `skypilot` section; its keys are those of `resources` in a "
                "SkyPilot task",
            ) from error


def check_installed() -> None:
    """Raises MissingExtraError if SkyPilot is not installed, without importing it."""
    if importlib.util.find_spec("sky") is None:
        raise missing_extra("sky", "a machine that SkyPilot provisions")


def _import_sky() -> Any:
    check_installed()
    return importlib.import_module("sky")


def _run_cli(arguments: Sequence[str]) -> None:
    """Runs SkyPilot's command line. Raises EngineError if it fails."""
    command = [sys.executable, "-P", "-c", "from sky.cli import cli; cli()", *arguments]
    command_line = f"`sky {' '.join(arguments)}`"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CLI_LIMIT_S,
            check=False,
            env=provisioning_environment(),
        )
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(
            f"{command_line} timed out after {_CLI_LIMIT_S} s",
            "no action needed: Stillroom retries; `sky api info` shows if SkyPilot's server runs",
        ) from error
    if done.returncode:
        text = _one_line(done.stderr.decode(errors="replace"))
        raise EngineError(
            f"{command_line}, which writes the cluster's ssh config, failed: {text}",
            "run the command in a terminal and fix the error that it prints",
        )


@contextmanager
def _convert_errors(sky: Any, problem: str, *, can_retry: bool = True) -> Generator[None]:
    """Converts SkyPilot's errors to UnreachableError if a retry may help, else to EngineError."""
    exceptions = sky.exceptions
    try:
        yield
    except EngineError:
        raise
    except exceptions.ResourcesUnavailableError as error:
        raise EngineError(
            f"{problem}: no provider has these resources available: {_one_line(str(error))}",
            "request another accelerator or region in machines.yml, remove use_spot, or try "
            "later; `sky gpus list` lists what is offered",
        ) from error
    except exceptions.NoCloudAccessError as error:
        raise EngineError(
            f"{problem}: SkyPilot has no access to a cloud: {_one_line(str(error))}",
            "run `sky check` in a terminal and set up a cloud",
        ) from error
    except Exception as error:  # The package raises errors of the clouds' own packages.
        text = f"{problem}: {type(error).__name__}: {_one_line(str(error))}"
        if not can_retry:
            raise EngineError(
                text, "see `sky api logs`, fix the error that it shows, then start the run again"
            ) from error
        raise UnreachableError(
            text,
            "no action needed: Stillroom retries; `sky api info` shows if SkyPilot's server runs",
        ) from error


def hold_script(
    folder: str,
    *,
    programs: Sequence[str] = _PROGRAMS,
    check_every_s: float = _CHECK_EVERY_S,
    num_idle_checks: int = _NUM_IDLE_CHECKS,
) -> str:
    """Returns a shell script that exits once no Stillroom process has run for a few minutes.

    SkyPilot treats a cluster without a SkyPilot job as idle and would delete it during a run. This
    script is submitted as a job that lasts as long as any process on the cluster matches `programs`
    (patterns of command lines) or was started from Stillroom's `folder`.
    """
    name = folder.rstrip("/").rpartition("/")[2]
    # The brackets keep the pattern from matching its own text in a command line.
    pattern = "|".join([*programs, f"/[{name[0]}]{re.escape(name[1:])}/"])
    return f"""\
quiet=0
while [ "$quiet" -lt {num_idle_checks} ]; do
  if cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\000' ' ' | grep -qE {shlex.quote(pattern)}; then
    quiet=0
  else
    quiet=$((quiet + 1))
  fi
  sleep {check_every_s}
done
"""


def _parse_offer(item: Any, *, is_spot: bool) -> Offer | None:
    """Returns an item of the catalogue as an Offer; None if it has no price."""
    price = item.spot_price if is_spot else item.price
    if price is None or math.isnan(price) or price <= 0:
        return None
    count, memory = int(item.accelerator_count), item.device_memory
    return Offer(
        instance=f"{item.cloud} {item.instance_type}",
        price_per_hour=round(float(price), 4),
        gpus=[item.accelerator_name] * count,
        gpu_memory_gb=[] if not memory or math.isnan(memory) else [round(memory, 1)] * count,
        num_processors=_optional_int(item.cpu_count),
        memory_gb=None if item.memory is None else float(item.memory),
    )


def _optional_int(number: float | None) -> int | None:
    return None if number is None or math.isnan(number) else int(number)


def _hourly_price(handle: Any) -> float | None:
    """Returns the price of a launched cluster in US dollars per hour; None if unknown."""
    try:
        resources, nodes = handle.launched_resources, handle.launched_nodes
        return _round_price(resources.get_cost(_HOUR_S) * nodes)
    except Exception:  # A cluster without a price, e.g. on the user's own machines.
        return None


def _round_price(price: float) -> float | None:
    return round(float(price), 4) if price > 0 else None


def _one_line(text: str) -> str:
    return " ".join(_ESCAPES.sub("", text).split())[:_MAX_CHARS]


class SkyProcess:
    """Makes each call of `SkyCalls` in a separate process.

    The package is large, prints to standard output, which a server uses for MCP, and has no
    timeouts of its own.
    """

    def call(
        self,
        method: Callable[Concatenate[SkyCalls, _Arguments], _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Makes a call in a child process, and returns its result or raises its EngineError."""
        code = f"from {__name__} import execute_call; execute_call()"
        result: Any
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", code],
                input=pickle.dumps((method, args, kwargs)),
                capture_output=True,
                timeout=_CALL_LIMIT_S,
                check=False,
                env=provisioning_environment(),
            )
            result = pickle.loads(done.stdout) if done.stdout else None  # noqa: S301
        except (subprocess.TimeoutExpired, pickle.UnpicklingError, EOFError) as error:
            raise _no_result_error(str(error)) from error
        if result is None:
            raise _no_result_error(done.stderr.decode(errors="replace"))
        if isinstance(result[0], EngineError):
            raise result[0]
        return result[0]


def _no_result_error(reason: str) -> UnreachableError:
    return UnreachableError(
        f"the process that calls SkyPilot exited without a result: {reason[-_MAX_CHARS:]}",
        "no action needed: Stillroom retries; if the error persists, run `sky check` in a terminal",
    )


def execute_call() -> None:
    """Reads a call from standard input, makes it, and writes its result to standard output."""
    method, args, kwargs = pickle.load(sys.stdin.buffer)  # noqa: S301
    sink = os.fdopen(os.dup(1), "wb")
    # What the package prints goes to standard error.
    os.dup2(2, 1)
    try:
        result = method(SkyCalls(), *args, **kwargs)
    except EngineError as error:
        result = error
    pickle.dump((result,), sink)
    sink.flush()

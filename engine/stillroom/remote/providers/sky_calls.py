"""The few calls of SkyPilot's Python package that we make, with its errors in our words."""

import importlib
import importlib.util
import math
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

from stillroom.errors import EngineError, missing_extra
from stillroom.remote.host import UnreachableError
from stillroom.remote.providers.holding import hold_script
from stillroom.remote.records import SkyPilotCluster
from stillroom.secrecy.environments import renting_environment

_CLI_LIMIT_S = 120
_LONGEST = 600
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HOUR_S = 3600

Outcome = Literal["waiting", "succeeded", "failed", "unknown"]
_OUTCOMES: dict[str, Outcome] = {
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "failed",
}


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What SkyPilot says about a cluster."""

    status: str
    """UP, INIT, STOPPED or AUTOSTOPPING."""
    price_per_hour: float | None

    @property
    def is_up(self) -> bool:
        """Whether ssh can reach it."""
        return self.status == "UP"

    @property
    def is_stopped(self) -> bool:
        """Whether its processes have ended, while its disk is kept."""
        return self.status == "STOPPED"


@dataclass(frozen=True, slots=True)
class Offer:
    """The cheapest machine of a catalogue that has what is asked for."""

    instance: str
    price_per_hour: float
    gpus: list[str]
    gpu_memory_gb: list[float]
    num_processors: int | None
    memory_gb: float | None


class SkyCalls:
    """SkyPilot's package. `package` is that module, or one with the same functions."""

    def __init__(
        self, package: Any = None, *, cli: Callable[[Sequence[str]], None] | None = None
    ) -> None:
        self._cli = cli or _run_cli
        self._sky = package if package is not None else _imported()

    def launch(self, name: str, cluster: SkyPilotCluster, *, folder: str) -> str:
        """Asks for a cluster, whose belt is set in the same call; returns the request's id.

        SkyPilot puts it down by itself once nothing of ours has run on it for `autostop` minutes,
        whether or not anything of ours is left here by then.
        """
        with _our_words(self._sky, f"could not ask for the cluster {name}"):
            task = self._task(run=hold_script(folder))
            task.set_resources(self._resources(cluster))
            return str(
                self._sky.launch(
                    task, cluster_name=name, idle_minutes_to_autostop=cluster.autostop, down=True
                )
            )

    def outcome(self, request_id: str) -> Outcome:
        """Returns how a request stands; `unknown` if SkyPilot has forgotten it."""
        with _our_words(self._sky, f"could not ask about request {request_id}"):
            requests = self._sky.api_status(request_ids=[request_id], all_status=True)
        return _OUTCOMES.get(str(requests[0].status), "waiting") if requests else "unknown"

    def raise_failure(self, request_id: str, name: str) -> None:
        """Raises the error that a failed request ended with."""
        with _our_words(self._sky, f"could not bring up the cluster {name}", has_answered=True):
            self._sky.get(request_id)
        raise EngineError(
            f"SkyPilot's request {request_id} for the cluster {name} was cancelled",
            "start the run again; `sky api logs` shows who cancelled it",
        )

    def look(self, name: str) -> ClusterView | None:
        """Returns how a cluster stands at its provider; None if it does not exist there."""
        with _our_words(self._sky, f"could not ask how the cluster {name} stands"):
            mode = self._sky.StatusRefreshMode.AUTO
            records = self._sky.get(self._sky.status(cluster_names=[name], refresh=mode))
        record = next((each for each in records if each["name"] == name), None)
        if record is None:
            return None
        status = str(getattr(record["status"], "value", record["status"]))
        return ClusterView(status, _price(record.get("handle")))

    def hold(self, name: str, *, folder: str) -> None:
        """Gives the cluster a job that lasts as long as anything of ours runs there.

        A run there is no job of SkyPilot's, which would take the cluster for idle.
        """
        with _our_words(self._sky, f"could not keep the cluster {name} for the run"):
            task = self._task(run=hold_script(folder))
            self._sky.get(self._sky.exec(task, cluster_name=name))

    def release(self, name: str) -> None:
        """Deletes the cluster, and returns when it is gone; there may be none."""
        with _our_words(self._sky, f"could not put down the cluster {name}"):
            try:
                self._sky.get(self._sky.down(name))
            except self._sky.exceptions.ClusterDoesNotExist:
                return

    def offer(self, cluster: SkyPilotCluster) -> Offer | None:
        """Returns the cheapest machine with the wanted accelerators in the user's clouds.

        None if no accelerator is asked for, or no cloud lists a price.
        """
        wanted = wanted_accelerator(cluster)
        if wanted is None:
            return None
        name, count = wanted
        cloud, _, region = str(cluster.resources.get("infra") or "").partition("/")
        cloud = cloud or str(cluster.resources.get("cloud") or "")
        with _our_words(self._sky, "could not ask SkyPilot for prices"):
            enabled = self._sky.get(self._sky.client.sdk.enabled_clouds())
            if not enabled:
                raise EngineError(
                    "SkyPilot has no access to a cloud",
                    "run `sky check` in a terminal and set up a cloud",
                )
            # It is the catalogue's own function, and answers at once.
            found = self._sky.list_accelerators(
                name_filter=f"^{re.escape(name)}$",
                region_filter=f"^{re.escape(region)}$" if region else None,
                quantity_filter=count,
                clouds=[each.lower() for each in ([cloud] if cloud else enabled)],
                case_sensitive=False,
            )
        is_spot = bool(cluster.resources.get("use_spot"))
        offers = [_offer(each, is_spot=is_spot) for listed in found.values() for each in listed]
        priced = [each for each in offers if each is not None]
        return min(priced, key=lambda each: each.price_per_hour, default=None)

    def write_ssh_entry(self, name: str) -> None:
        """Writes the cluster's entry for ssh, as SkyPilot's own command line does."""
        self._cli(["status", name])

    def close(self) -> None:
        """Does nothing: there is no process to end (see `SkyProcess`)."""

    def _task(self, *, run: str | None) -> Any:
        return self._sky.Task(name="stillroom", run=run)

    def _resources(self, cluster: SkyPilotCluster) -> Any:
        try:
            return self._sky.Resources.from_yaml_config(dict(cluster.resources))
        except Exception as error:  # SkyPilot raises many kinds for a faulty key or value
            raise EngineError(
                f"SkyPilot does not take these resources of machines.yml: {_plain(str(error))}",
                "mend the machine's `skypilot` section; its keys are those of `resources` in a "
                "SkyPilot task",
            ) from error


def check_installed() -> None:
    """Raises MissingExtraError if SkyPilot is not installed; imports nothing of it."""
    if importlib.util.find_spec("sky") is None:
        raise missing_extra("sky", "a machine that SkyPilot brings up")


def _imported() -> Any:
    check_installed()
    return importlib.import_module("sky")


def _run_cli(arguments: Sequence[str]) -> None:
    """Carries out a command of SkyPilot's command line."""
    command = [sys.executable, "-P", "-c", "from sky.cli import cli; cli()", *arguments]
    shown = f"`sky {' '.join(arguments)}`"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CLI_LIMIT_S,
            check=False,
            env=renting_environment(),
        )
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(
            f"{shown} did not answer within {_CLI_LIMIT_S} s",
            "nothing: it is tried again; `sky api info` shows whether SkyPilot's server lives",
        ) from error
    if done.returncode:
        text = _plain(done.stderr.decode(errors="replace"))
        raise EngineError(
            f"{shown} failed, which tells ssh how to reach the cluster: {text}",
            "run it in a terminal and mend what it says",
        )


@contextmanager
def _our_words(sky: Any, problem: str, *, has_answered: bool = False) -> Generator[None]:
    """Raises the package's errors as ours: UnreachableError where trying again may help."""
    exceptions = sky.exceptions
    try:
        yield
    except EngineError:
        raise
    except exceptions.ResourcesUnavailableError as error:
        raise EngineError(
            f"{problem}: no provider has these resources now: {_plain(str(error))}",
            "ask for another accelerator or region in machines.yml, leave use_spot out, or try "
            "later; `sky gpus list` shows what there is",
        ) from error
    except exceptions.NoCloudAccessError as error:
        raise EngineError(
            f"{problem}: SkyPilot has no access to a cloud: {_plain(str(error))}",
            "run `sky check` in a terminal and set up a cloud",
        ) from error
    except Exception as error:  # the package raises errors of the clouds' own packages
        text = f"{problem}: {type(error).__name__}: {_plain(str(error))}"
        if has_answered:
            raise EngineError(text, "see `sky api logs`, mend what it says, start again") from error
        raise UnreachableError(
            text, "nothing: it is tried again; `sky api info` shows whether SkyPilot's server lives"
        ) from error


def wanted_accelerator(cluster: SkyPilotCluster) -> tuple[str, int] | None:
    """Returns the one accelerator that machines.yml asks for, and how many; None if none or any."""
    wanted = cluster.resources.get("accelerators")
    if isinstance(wanted, dict) and len(cast("dict[str, Any]", wanted)) == 1:
        ((name, count),) = cast("dict[str, Any]", wanted).items()
    elif isinstance(wanted, str):
        name, _, count = wanted.partition(":")
    else:
        return None
    try:
        return str(name), int(float(count or 1))
    except ValueError:
        return None


def _offer(listed: Any, *, is_spot: bool) -> Offer | None:
    """Returns an entry of the catalogue; None if it has no price."""
    price = listed.spot_price if is_spot else listed.price
    if price is None or math.isnan(price) or price <= 0:
        return None
    count, memory = int(listed.accelerator_count), listed.device_memory
    return Offer(
        instance=f"{listed.cloud} {listed.instance_type}",
        price_per_hour=round(float(price), 4),
        gpus=[listed.accelerator_name] * count,
        gpu_memory_gb=[] if not memory or math.isnan(memory) else [round(memory, 1)] * count,
        num_processors=_whole(listed.cpu_count),
        memory_gb=None if listed.memory is None else float(listed.memory),
    )


def _whole(number: float | None) -> int | None:
    return None if number is None or math.isnan(number) else int(number)


def _price(handle: Any) -> float | None:
    """Returns the US dollars an hour of a launched cluster; None where no price is known."""
    try:
        resources, nodes = handle.launched_resources, handle.launched_nodes
        return _rounded(resources.get_cost(_HOUR_S) * nodes)
    except Exception:  # a cluster without a price, e.g. on machines of the user's own
        return None


def _rounded(price: float) -> float | None:
    return round(float(price), 4) if price > 0 else None


def _plain(text: str) -> str:
    return " ".join(_ESCAPES.sub("", text).split())[:_LONGEST]

"""The calls of huggingface_hub about jobs, and how long a job may last and what it costs."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.machine import HfJobsFlavor
from stillroom.remote.providers.hf_bucket import BUCKET_VARIABLE, CODE_VARIABLE, hub_errors
from stillroom.remote.providers.provision_log import ProvisionLog
from stillroom.remote.records import LaunchRequest

_IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"
_LABEL = "stillroom-run"
_OVER = frozenset({"COMPLETED", "CANCELED", "ERROR", "DELETED"})
_NOT_FOUND = 404
_LOG_LINES = 15
_LONGEST = 600
_SETUP_S = 1800.0
_LEAST_S = 300.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PER_HOUR = {"second": 3600.0, "minute": 60.0, "hour": 1.0}
_HOUR_S = 3600.0

_BOOT = f"""
import os, sys, tarfile, tempfile
from huggingface_hub import HfApi
folder = tempfile.mkdtemp()
archive = folder + "/code.tar.gz"
files = [(os.environ["{CODE_VARIABLE}"], archive)]
HfApi().download_bucket_files(os.environ["{BUCKET_VARIABLE}"], files, raise_on_missing_files=True)
tarfile.open(archive).extractall(folder, filter="data")
sys.path.insert(0, folder)
from stillroom.remote.providers.hf_job_program import main
sys.exit(main())
"""


class HubJobs:
    """The jobs of a namespace. `api` is huggingface_hub's `HfApi`, or has the same methods."""

    def __init__(self, api: Any, namespace: str | None = None) -> None:
        self._api, self._namespace = api, namespace

    @property
    def namespace(self) -> str:
        """The user or organisation whose jobs they are; the token's own if none was given."""
        if self._namespace is None:
            with hub_errors("could not ask Hugging Face whose token this is"):
                self._namespace = str(self._api.whoami()["name"])
        return self._namespace

    def hardware(self, flavor: str) -> Any:
        """Returns what the service lists of a flavor; None if it has none of this name."""
        with hub_errors("could not ask Hugging Face for the flavors of jobs"):
            found = self._api.list_jobs_hardware()
        return next((each for each in found if each.name == flavor), None)

    def run(
        self,
        run_id: str,
        flavor: HfJobsFlavor,
        *,
        variables: Mapping[str, str],
        secrets: Mapping[str, str],
        timeout_s: float,
        packages: list[str],
    ) -> str:
        """Starts the job of a run, with the service's own limit of time, and returns its id.

        packages: what our program in the job needs to begin with.
        """
        with hub_errors(f"could not start the job of {run_id}"):
            job = self._api.run_job(
                image=flavor.image or _IMAGE,
                command=_command(packages),
                env=dict(variables),
                secrets=dict(secrets),
                flavor=flavor.flavor,
                timeout=int(timeout_s),
                name=f"stillroom-{run_id}",
                labels={_LABEL: run_id},
                namespace=self.namespace,
            )
        return str(job.id)

    def find(self, run_id: str) -> str | None:
        """Returns the id of the job that was started for a run; None if there is none."""
        with hub_errors("could not list the jobs"):
            found = list(self._api.list_jobs(labels={_LABEL: run_id}, namespace=self.namespace))
        return str(found[0].id) if found else None

    def stage(self, job_id: str) -> str:
        """Returns how a job stands: SCHEDULING, RUNNING, or how it has ended."""
        from huggingface_hub.errors import HfHubHTTPError

        with hub_errors(f"could not ask how the job {job_id} stands"):
            try:
                job = self._api.inspect_job(job_id=job_id, namespace=self.namespace)
            except HfHubHTTPError as error:
                if error.response.status_code != _NOT_FOUND:
                    raise
                return "DELETED"
        return _stage(job)

    def is_over(self, job_id: str) -> bool:
        """Whether a job has ended, and so costs nothing any more."""
        return self.stage(job_id) in _OVER

    def end(self, job_id: str) -> None:
        """Ends a job at once."""
        with hub_errors(f"could not end the job {job_id}"):
            self._api.cancel_job(job_id=job_id, namespace=self.namespace)

    def final_log(self, job_id: str) -> str:
        """Returns how a job ended, with the end of its log; empty if the service does not say."""
        with suppress(UnreachableError, MachineError), hub_errors("could not read the job's log"):
            job = self._api.inspect_job(job_id=job_id, namespace=self.namespace)
            lines = self._api.fetch_job_logs(
                job_id=job_id, namespace=self.namespace, follow=False, tail=_LOG_LINES
            )
            log = " | ".join(line.strip() for line in lines)[-_LONGEST:]
            return f" ({_stage(job)}: {job.status.message or 'no message'}): {log}"
        return ""

    def release(self, provision_log: ProvisionLog, name: str, *, run: Path | None) -> None:
        """Ends a job and removes it from the log once the service says that it has ended."""
        with provision_log.holding(name) as held:
            if held.entry is None or not held.drop_run(run):
                return
            job_id = held.entry.request_id or self.find(name.removeprefix("stillroom-"))
            if job_id is None:
                # A start that a kill cut off may still be on its way.
                if held.entry.is_old:
                    held.forget()
                return
            if not self.is_over(job_id):
                self.end(job_id)
                if not self.is_over(job_id):
                    raise UnreachableError(
                        f"the job {job_id} is still running although it was cancelled",
                        f"no action needed: it is retried; by hand: `hf jobs cancel {job_id}`",
                    )
            held.forget()


def time_limit(flavor: HfJobsFlavor, run: LaunchRequest, price: float | None) -> float:
    """Returns the seconds after which the service ends the job, whatever happens to us.

    Raises MachineError if the budget is not enough for a job.
    """
    own = flavor.timeout
    seconds = float(own[:-1]) * _UNITS[own[-1]] if own[-1] in _UNITS else float(own)
    limits = [seconds, run.max_hours * _HOUR_S + _SETUP_S]
    if price and run.budget_usd is not None:
        limits.append((run.budget_usd - run.spent_usd) / price * _HOUR_S)
    limit = min(limits)
    if limit < _LEAST_S:
        raise MachineError(
            f"budget_usd and timeout leave the job {max(0.0, limit):.0f} s, and it needs "
            f"{_LEAST_S:.0f} s to install and start anything",
            "raise budget_usd, or `timeout` of the machine in machines.yml",
        )
    return limit


def price_of(hardware: Any) -> float | None:
    """Returns the US dollars an hour of a flavor as the service lists it."""
    factor = _PER_HOUR.get(str(hardware.unit_label))
    return None if factor is None else round(float(hardware.unit_cost_usd) * factor, 4)


def _command(packages: list[str]) -> list[str]:
    """Returns the command of a job: it fetches our code from the bucket and runs it."""
    wanted = [word for each in packages for word in ("--with", each)]
    run = ["uv", "run", "--no-project", "--python", ">=3.11", *wanted, "python", "-P", "-c", _BOOT]
    line = f"command -v uv >/dev/null || pip install -q uv; exec {shlex.join(run)}"
    return ["sh", "-c", line]


def _stage(job: Any) -> str:
    stage = job.status.stage
    return str(getattr(stage, "value", stage))

"""Training runs that end as a killed process does, and what they leave."""

import pytest
from safetensors.torch import load_file

from fakes.reporters import KeptReporter


class KilledError(BaseException):
    """What a process that is killed does not survive."""


class DyingReporter(KeptReporter):
    """Ends the run the moment a step is over, before anything of it is kept."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after
        self._first = 0

    def progress(self, done, total, *, unit, phase):
        # A later phase counts its own steps.
        self._first = self._first or (total if phase == "cold_start" else 0)
        if done + (0 if phase == "cold_start" else self._first) == self._after:
            raise KilledError


def measured(project):
    timed = ("tokens_per_s", "memory_gb", "sample_s", "update_s")
    return [{k: v for k, v in m.items() if k not in timed} for m in project.reporter.measured]


def weights(project, run):
    folder = project.checkpoint("final", run)
    return load_file(next(folder.glob("*model.safetensors")))


def killed(project, run, step):
    project.reporter = DyingReporter(step)
    with pytest.raises(KilledError):
        project.train(run)

"""Training runs that end as a killed process does, and what they leave."""

import pytest
import torch
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

    def progress(self, done, total, *, unit, phase, eta_s=None):
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


def assert_resumes_exactly(project, step, *, save_step=1):
    """Trains a run, and one that is killed at `step` and resumed: metrics and weights are equal.

    step: its number, or a function that returns it for the result of the whole run.
    Returns the result and the metrics of the run that nobody killed.
    """
    whole = project.train("whole")
    step = step(whole) if callable(step) else step
    unbroken = measured(project)
    killed(project, "killed", step)
    project.reporter = KeptReporter()
    resumed = project.train("resumed", resume="killed")

    # Earlier steps' metrics are in the killed run's events.jsonl, which the fake does not write.
    assert measured(project) == unbroken[(step - 1) // save_step * save_step :]
    assert (resumed.steps, resumed.kept_step) == (whole.steps, whole.kept_step)
    assert resumed.trained_tokens == whole.trained_tokens
    assert_same_weights(project, "resumed", "whole")
    return whole, unbroken


def assert_same_weights(project, *runs):
    ours, reference = (weights(project, run) for run in runs)
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in ours)

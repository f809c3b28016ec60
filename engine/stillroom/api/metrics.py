"""The metrics of a run over its steps, few enough to be read at once."""

import msgspec

from stillroom.run_folder import find_run
from stillroom.settings import Workspace

_MOST_POINTS = 400


class RunMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A run's metrics in columns: `values[name][i]` was measured at `steps[i]`."""

    run_id: str
    num_steps: int
    """How many steps have metrics; more than there are points where these are thinned out."""
    steps: list[int]
    values: dict[str, list[float | None]]
    """None where a metric was not measured or not finite."""


def read_run_metrics(workspace: Workspace, run_id: str) -> RunMetrics:
    """Returns the metrics of a run, thinned out evenly to 400 points; the last step is kept."""
    folder = find_run(workspace, run_id)
    by_step: dict[int, dict[str, float | None]] = {}
    for step, values in folder.read_metrics():
        by_step.setdefault(step, {}).update(values)
    steps = sorted(by_step)
    stride = -(-len(steps) // _MOST_POINTS) or 1
    shown = steps[::-1][::stride][::-1]
    names = dict.fromkeys(name for step in shown for name in by_step[step])
    return RunMetrics(
        run_id=folder.run_id,
        num_steps=len(steps),
        steps=shown,
        values={name: [by_step[step].get(name) for step in shown] for name in names},
    )

"""Protects rollouts from overwriting, and names the models that answered in other systems."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from stillroom.data.layouts import nemo_gym
from stillroom.data.row_files import rollout_files
from stillroom.errors import InputError
from stillroom.lineage import AnsweringModel, ModelRecord
from stillroom.rollout.journal.journal import holds_rollouts

_MAX_TEACHERS = 20


def check_output(output: Path, sources: Sequence[Path]) -> None:
    """Raises InputError if writing the output would replace an input, or a run's rollouts.

    Rollouts are protected because they cost money to make.
    """
    if output.resolve() in {file.resolve() for path in sources for file in rollout_files(path)}:
        raise InputError(f"the output {output} is the input itself", "choose another output")
    if holds_rollouts(output):
        raise InputError(
            f"the output {output} holds rollouts that generate_rollouts wrote",
            "choose another output; delete the file yourself if it is not needed any more",
        )


def foreign_teachers(num_rows: Counter[str]) -> Iterator[ModelRecord]:
    """Yields the models that answered in another system, of which no manifest tells.

    `num_rows` is the number of rows that each of them answered.
    """
    for name, rows in num_rows.most_common(_MAX_TEACHERS):
        answering = AnsweringModel(model=name, rows=rows)
        yield ModelRecord(
            role="policy", name=name, location=nemo_gym.LAYOUT, answered_by=[answering]
        )

import math
from pathlib import Path

import pytest

from fakes.collected_rows import logged, taken
from stillroom.importing.output.feedback import reward_of, settled_feedback
from stillroom.importing.records import Feedback, Place


def feedback(line, about, value, name="good"):
    return Feedback(Place(Path("scores.jsonl"), line), about, name, value)


def test_feedback_finds_the_rollout_that_its_row_went_into(tmp_path):
    rows = [
        logged(1, "Hi", "Hello", id="c1", group="s"),
        logged(2, "Hi", "Hello", "Bye", "Bye", id="c2", group="s", judged_as=("t2",)),
        logged(3, "Other", "x", id="c3", group="s"),
        feedback(1, "c1", 0.25),
        feedback(2, "t2", 1.0, "late"),
        feedback(3, "s", 0.5, "session"),
        feedback(4, "c1", 0.75),
        feedback(5, "nobody", 1.0),
        feedback(6, "c3", math.nan),
    ]
    with taken(tmp_path, rows) as found:
        scores = settled_feedback(found.collected, found.joined, found.tally)
        assert scores == {1: {"good": 0.75, "late": 1.0, "session": 0.5}, 2: {"session": 0.5}}
        assert [row.source for row in found.refused] == ["scores.jsonl:5", "scores.jsonl:6"]
        count = found.tally.formats["calls"]
        assert (count.read, count.merged, count.refused) == (9, 4, 2)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), None),
        (("a",), 1.0),
        (("a", "b"), 0.5),
        (("a", "c"), None),
        (("langfuse.score.a",), 1.0),
        (("x.score.y",), 0.25),
    ],
)
def test_the_reward_is_the_mean_of_the_named_scores_if_none_lacks(names, expected):
    assert reward_of({"a": 1.0, "b": 0.0, "x.score.y": 0.25}, names) == expected

import json
import pickle

import pytest

from stillroom import errors
from stillroom.errors import (
    CallFailedError,
    DataError,
    EngineError,
    FailureClass,
)

FAMILY = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, EngineError)
]


@pytest.mark.parametrize("kind", FAMILY)
def test_an_error_survives_the_way_between_processes(kind: type[EngineError]) -> None:
    error = pickle.loads(pickle.dumps(kind("file.jsonl:3: no", "mend it")))  # noqa: S301

    assert type(error) is kind
    assert (error.problem, error.fix) == ("file.jsonl:3: no", "mend it")
    assert str(error) == "file.jsonl:3: no\nfix: mend it"


def test_the_failure_of_a_call_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(CallFailedError(FailureClass.TIMEOUT, "no answer")))  # noqa: S301

    assert (error.kind, error.message, str(error)) == (
        FailureClass.TIMEOUT,
        "no answer",
        "no answer",
    )


def test_an_error_can_be_written_whatever_it_quotes():
    error = DataError("the file caf\udce9" + "x" * 100_000, "rename it")
    assert len(error.problem) < 4100
    assert error.problem.startswith("the file caf\\udce9xxx")
    assert "characters left out" in error.problem
    assert json.loads(json.dumps(str(error)).encode()) == str(error)

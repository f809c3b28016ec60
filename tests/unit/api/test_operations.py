"""The table of operations names what is there, and says truly what goes in and comes out."""

import gc
import inspect
import typing

import pytest

from stillroom import api
from stillroom.api.curation import SOURCE_FIELDS
from stillroom.api.operations import OPERATIONS, child_work, operation_of_run
from stillroom.jobs.operations import Operation, load
from stillroom.train.config.request import PlanTraining
from stillroom.types import RunKind


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_the_function_takes_the_request_and_returns_the_result(operation: Operation) -> None:
    function = load(operation.function)
    hints = typing.get_type_hints(function)

    assert function is getattr(api, operation.name)
    assert hints["request"] is operation.request
    assert hints["return"] is operation.result


@pytest.mark.parametrize("kind", RunKind)
def test_every_kind_of_run_has_a_function_that_does_it(kind: RunKind) -> None:
    operation = operation_of_run(kind)
    if operation.run_if_large is kind:
        assert load(operation.function) is getattr(api, operation.name)
        return
    assert operation.run is not None
    for name in filter(None, (operation.run.function, operation.run.on_ray)):
        parameters = inspect.signature(load(name)).parameters
        assert list(parameters)[:4] == ["workspace", "request", "folder", "reporter"]
        assert typing.get_type_hints(load(name))["request"] is operation.request


@pytest.mark.parametrize(
    "operation", [o for o in OPERATIONS if o.run_if_large], ids=lambda o: o.name
)
def test_the_size_of_what_may_become_a_run_is_read_from_a_field_of_its_request(
    operation: Operation,
) -> None:
    if operation.request is not PlanTraining:  # config.yml names its files
        assert not {*SOURCE_FIELDS}.isdisjoint(operation.request.model_fields)


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.child], ids=lambda o: o.name)
def test_what_a_child_does_takes_a_workspace_and_a_request(operation: Operation) -> None:
    function = load(child_work(operation.name).function)
    assert list(inspect.signature(function).parameters)[:2] == ["workspace", "request"]


def test_what_loads_a_library_looks_through_no_objects_and_collects_again_afterwards(
    tmp_path, monkeypatch
):
    (tmp_path / "loaded_library.py").write_text("import gc\nwas_collecting = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert not load("loaded_library:was_collecting")
    assert gc.isenabled()
    with pytest.raises(ImportError):
        load("no_such_library:anything")
    assert gc.isenabled()

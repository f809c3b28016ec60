"""Filtering in a child process: what the server itself must not load."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.rollout_lines import encoded
from fakes.rollout_rows import assistant, read_rows, rollout_row, user, write_lines
from stillroom import api
from stillroom.demo import DEMO_MODELS
from stillroom.errors import EngineError
from stillroom.jobs import child
from stillroom.jobs.child import run_in_child
from stillroom.jobs.operations import ChildWork
from stillroom.secrecy.environments import run_environment
from stillroom.settings import Workspace


def filtered(folder: Path, **options: object) -> api.FilterResult:
    request = api.FilterDataset.model_validate(
        {"input": "rollouts.jsonl", "output": "kept.jsonl", **options}
    )
    return api.filter_dataset(Workspace(folder), request)


@pytest.mark.usefixtures("warm_python")
def test_rows_of_too_many_tokens_of_the_student_are_dropped(tmp_path: Path) -> None:
    rows = [
        rollout_row(task_id="short", messages=[user("price"), assistant("12")]),
        rollout_row(task_id="long", messages=[user("price " * 50), assistant("12")]),
        rollout_row(task_id="open", messages=[user("price")], success=False),
    ]
    write_lines(tmp_path / "rollouts.jsonl", map(encoded, rows))

    result = filtered(tmp_path, max_tokens=40, model="demo/student", max_per_category=5)

    assert [row["task_id"] for row in read_rows(tmp_path / "kept.jsonl")][:1] == ["short"]
    assert result.dropped["over 40 tokens"] == 1
    assert result.read == result.kept + sum(result.dropped.values()) == 3
    assert result.before.tokens is not None
    assert result.after.tokens is not None
    assert result.after.tokens.high <= 40 < result.before.tokens.high


def test_what_is_wrong_in_the_child_is_told_as_it_is(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row())])

    with pytest.raises(EngineError, match="language 'klingon' is unknown"):
        filtered(tmp_path, language="klingon")
    with pytest.raises(EngineError, match="there is no model 'no-such-model'"):
        filtered(tmp_path, model="no-such-model")
    with pytest.raises(EngineError, match=r"file 'held\.jsonl' does not exist"):
        filtered(tmp_path, decontaminate=["held.jsonl"])


def test_a_child_gets_the_environment_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it torch's threads spin on a busy machine, and a plan's trial takes minutes."""
    environments = []

    def started(*args: Any, env: dict[str, str] | None = None, **options: Any) -> Any:
        environments.append(env)
        return popen(*args, env=env, **options)

    popen = subprocess.Popen
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(subprocess, "Popen", started)
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row())])

    with pytest.raises(EngineError):
        filtered(tmp_path, language="klingon")

    [environment] = environments
    assert environment == run_environment(tmp_path)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_heavy_filters_load_nothing_into_this_process(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row())] * 2)
    program = (
        "import sys; from pathlib import Path; from stillroom import api;"
        "from stillroom.settings import Workspace;"
        "request = api.FilterDataset(input='rollouts.jsonl', output='kept.jsonl', dedupe='near',"
        " language='en', drop_secrets=True);"
        "result = api.filter_dataset(Workspace(Path.cwd()), request);"
        "print(result.read, sorted({'rensa', 'eld', 'torch', 'numpy'} & set(sys.modules)))"
    )

    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert finished.stdout == "2 []\n"


WAITING = ChildWork(
    function="work_of_a_child:wait",
    timeout_s=0.01,
    action="waiting",
    fix="wait for less",
    libraries="library_of_a_child",
)


def error_of_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, work: ChildWork = WAITING, *, library: str = ""
) -> EngineError:
    """Returns the error of a child that waits too long, with the source of its library."""
    (folder / "library_of_a_child.py").write_text(library)
    (folder / "work_of_a_child.py").write_text(
        "import threading\ndef wait(workspace, request):\n    threading.Event().wait(100)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    with pytest.raises(EngineError) as caught:
        run_in_child(Workspace(folder), work, api.GetRun(run_id="r"), result=str)
    return caught.value


def test_the_time_limit_begins_once_the_libraries_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_LOADING_S", 60.0)
    loaded = tmp_path / "loaded"
    # The library leaves a line unfinished.
    library = f"import os\nopen({str(loaded)!r}, 'w').close()\nos.write(2, b'Loading: 50%')\n"

    error = error_of_waiting(tmp_path, monkeypatch, library=library)

    assert error.problem == "waiting timed out after 0.01 s"
    assert error.fix.startswith("wait for less; or call it again")
    assert loaded.exists()


def test_a_child_without_heavy_libraries_is_not_said_to_load_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_LOADING_S", 0.01)

    error = error_of_waiting(tmp_path, monkeypatch, replace(WAITING, libraries=None))

    assert error.problem == "waiting timed out after 0.01 s"


@pytest.mark.parametrize("kind", ["OSError", "ImportError", "RuntimeError"])
def test_libraries_that_are_installed_but_cannot_be_loaded_are_to_be_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    error = error_of_waiting(tmp_path, monkeypatch, library=f"raise {kind}('no libcudart.so.12')")

    assert error.problem == "waiting failed: its libraries could not be loaded: no libcudart.so.12"
    assert error.fix.startswith("repair the installation of torch and transformers")


@pytest.mark.usefixtures("warm_python")
def test_a_template_that_asks_for_gigabytes_is_refused(tmp_path: Path) -> None:
    shutil.copytree(next(iter(DEMO_MODELS.values())), tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{{ 'a' * 4000000000 }}", encoding="utf-8")
    write_lines(tmp_path / "rollouts.jsonl", [encoded(rollout_row())])
    request = api.InspectExamples(path="rollouts.jsonl", model="model")

    try:
        page = api.inspect_examples(Workspace(tmp_path), request)
        reported = " ".join(str(example.problem) for example in page.examples)
    except EngineError as error:
        reported = str(error)

    assert "memory" in reported.lower()

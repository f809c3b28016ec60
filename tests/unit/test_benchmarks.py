"""No benchmark and no thorough test imports what is gone; what each measures is in its own text."""

import ast
import importlib
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from fakes.source_tree import ROOT

FOLDER = ROOT / "benchmarks"
FOLDERS = (FOLDER, ROOT / "tests" / "thorough")
PLACES = tuple(f"{folder}{os.sep}" for folder in FOLDERS)
SCRIPTS = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))
PEERS = {"datasets", "polars", "orjson", "inspect_ai", "openai", "ray", "trl", "verifiers"}
"""What some scripts compare with, which is no dependency."""


def modules_of_scripts() -> dict[str, ModuleType]:
    """Returns the loaded modules that lie in the folders; several have the same names."""
    places = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return {
        name: sys.modules[name]
        for name, place in places.items()
        if place is not None and place.startswith(PLACES)
    }


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch):
    """Takes away the scripts' modules that other tests have loaded, and then those of the test."""
    known, environment = modules_of_scripts(), dict(os.environ)
    for name in known:
        del sys.modules[name]
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "1", "2", "3", "4"])
    yield
    os.environ.clear()
    os.environ.update(environment)
    for name in modules_of_scripts():
        del sys.modules[name]
    sys.modules.update(known)


# The first one loads torch and more, unless it is loaded already.
@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_benchmark_finds_all_that_it_imports(script: Path, apart: None) -> None:
    # Some are imported by scripts of other folders, which put all of them on the path.
    sys.path[:0] = [str(script.parent), str(FOLDER)]
    try:
        runpy.run_path(str(script), run_name="imported")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in PEERS:
            raise
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stillroom"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                assert hasattr(module, alias.name) or find_spec(full), full

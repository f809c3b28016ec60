"""The module in C, compiled here from its source, so that a test says how."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "engine" / "stillroom" / "curate" / "_outline.c"
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Werror")
_SHARED = ("-bundle", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared",)


def can_compile() -> bool:
    """Whether there is a compiler, and what it includes."""
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return shutil.which("cc") is not None and has_headers


def compile_outline(folder: Path, *flags: str) -> Path:
    """The compiled module; skips the test where there is no compiler or no headers of Python."""
    if not can_compile():
        pytest.skip("no C compiler, or no headers of Python")
    module = folder / "_outline.abi3.so"
    include = f"-I{sysconfig.get_path('include')}"
    command = ["cc", "-std=c11", "-O1", "-fPIC", *_SHARED, *flags, include]
    subprocess.run([*command, str(SOURCE), "-o", str(module)], check=True, timeout=120)
    return module


def load_outline(module: Path) -> ModuleType:
    """The module that a file holds."""
    spec = importlib.util.spec_from_file_location("_outline", module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded

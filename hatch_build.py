"""Builds the one module in C; without a compiler it is left out, and Python is slower alone."""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError

MODULE = "stillroom.curate._outline"
SOURCES = "engine/stillroom/curate"


class OutlineBuildHook(BuildHookInterface):
    """Compiles for the stable ABI: one wheel serves every Python from 3.11 on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Puts the module into the wheel; in an editable installation beside its source."""
        if self.target_name != "wheel":
            return
        self._folder = tempfile.mkdtemp()
        built = compiled(Path(self.root), Path(self._folder))
        if built is None:
            sys.stderr.write(f"{MODULE} was not built: rollouts will be read more slowly\n")
        if version == "editable":
            _put_beside_source(built, Path(self.root) / SOURCES)
        elif built is not None:
            build_data["force_include"][str(built)] = f"stillroom/curate/{built.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Takes away what the wheel holds by now."""
        del version, build_data, artifact_path
        if self.target_name == "wheel":
            shutil.rmtree(self._folder, ignore_errors=True)


def compiled(root: Path, folder: Path) -> Path | None:
    """Returns the module, built into a folder; None where that failed or has no stable ABI."""
    extension = Extension(
        MODULE,
        [str(root / SOURCES / "_outline.c")],
        extra_compile_args=["-std=c11", "-O2"],
        py_limited_api=True,
        optional=True,
    )
    command = build_ext(Distribution({"ext_modules": [extension]}))
    command.build_temp = command.build_lib = str(folder)
    command.ensure_finalized()
    try:
        command.run()
    except (BaseError, OSError) as error:
        sys.stderr.write(f"{error}\n")
    return next(folder.rglob("_outline.abi3.so"), None)


def _put_beside_source(built: Path | None, sources: Path) -> None:
    # One that was built before, from other sources, must not stay.
    for stale in sources.glob("_outline.*.so"):
        stale.unlink()
    if built is not None:
        shutil.copy(built, sources)


def _platform() -> str:
    # Built here, it may need this machine's C library: no tag of manylinux.
    found = (tag.platform for tag in sys_tags())
    return next(name for name in found if not name.startswith(("manylinux", "musllinux")))

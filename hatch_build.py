"""Builds the one module in C; without a compiler it is left out, and Python is slower alone."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

MODULE = "stillroom.curate._outline"
SOURCES = Path("engine/stillroom/curate")


class OutlineBuildHook(BuildHookInterface):
    """Compiles for the stable ABI: one wheel serves every Python from 3.11 on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Puts the module beside its source, and into the wheel."""
        del version
        if self.target_name != "wheel":
            return
        for stale in (Path(self.root) / SOURCES).glob("_outline.*.so"):
            stale.unlink()
        if (built := compiled(Path(self.root))) is None:
            return
        build_data["artifacts"].append(str(built.relative_to(self.root)))
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{_platform()}"


def compiled(root: Path) -> Path | None:
    """Returns the compiled module; None, and a word on stderr, where that failed."""
    extension = Extension(
        MODULE,
        [str(root / SOURCES / "_outline.c")],
        depends=[str(root / SOURCES / "_json.h")],
        extra_compile_args=["-std=c11", "-O2"],
        py_limited_api=True,
        optional=True,
    )
    package_dir = {"": str(root / "engine")}
    command = build_ext(Distribution({"ext_modules": [extension], "package_dir": package_dir}))
    with tempfile.TemporaryDirectory() as build:
        command.build_temp = command.build_lib = build
        command.inplace = True
        command.ensure_finalized()
        command.run()
    built = next((root / SOURCES).glob("_outline.*.so"), None)
    if built is None:
        sys.stderr.write(f"{MODULE} was not built: curation will read rollouts more slowly\n")
    return built


def _platform() -> str:
    # Built here, it may need this machine's C library: no tag of manylinux.
    found = (tag.platform for tag in sys_tags())
    return next(name for name in found if not name.startswith(("manylinux", "musllinux")))

"""`pytest --quick`: passes over what loads a heavy library, opens a browser or starts a process.

Nobody has to mark a test. One that does any of these things is skipped as it begins to, and a
module that imports a heavy library is skipped as a whole. Tests that are marked as thorough, since
they take half a second or more, and those of hypothesis, which try many cases, are left out. Of a
test that is done for several seeds, one in ten is done.
"""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

HEAVY_LIBRARIES = frozenset(
    {"accelerate", "bitsandbytes", "peft", "playwright", "ray", "torch", "transformers", "trl"}
)
_EVERY_NTH_SEED = 10
_STARTING = frozenset({"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"})


class _HeavyImports:
    """A finder that is asked before all others, and lets no heavy library be imported."""

    def find_spec(self, name: str, *_: Any) -> None:
        library = name.partition(".")[0]
        if library in HEAVY_LIBRARIES:
            pytest.skip(f"loads {library}", allow_module_level=True)


def _refuse_processes(event: str, _arguments: Any) -> None:
    if event in _STARTING:
        pytest.skip("starts a process")


def _seed_number(item: pytest.Item) -> int:
    """Returns which of a test's seeds it is done for; 0 if it has none."""
    return item.callspec.indices.get("seed", 0) if hasattr(item, "callspec") else 0


def _skips_in(error: BaseException) -> Iterator[pytest.skip.Exception]:
    """Yields the skips inside the groups that task groups make."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _skips_in(inner)
    elif isinstance(error, pytest.skip.Exception):
        yield error


class QuickOnly:
    """The plugin that is registered for `--quick`."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Begins to refuse."""
        sys.meta_path.insert(0, _HeavyImports())
        sys.addaudithook(_refuse_processes)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out most seeds, and the tests that try many cases or are marked as thorough."""
        items[:] = [
            item
            for item in items
            if _seed_number(item) % _EVERY_NTH_SEED == 0
            and not item.get_closest_marker("thorough")
            and not getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Any:
        """Lets a skip out of the groups around it."""
        if call.excinfo is not None and isinstance(call.excinfo.value, BaseExceptionGroup):
            for skip in _skips_in(call.excinfo.value):
                call.excinfo = pytest.ExceptionInfo.from_exception(skip)
        return (yield)

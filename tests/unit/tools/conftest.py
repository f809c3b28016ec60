"""Fixtures of the tests that load users' files."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def same_imports() -> Iterator[None]:
    """Takes back what loading a user's file changes in the process."""
    paths, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)
    yield
    sys.path[:], sys.meta_path[:] = paths, finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]

"""Fixtures of what runs for real: a browser, a Ray cluster."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.sshd import MISSING, SSHD, Sshd, SshUser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium of its own."""
    from playwright.sync_api import sync_playwright

    from fakes.browser import launch_chromium

    with sync_playwright() as playwright:
        browser = launch_chromium(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(browser: Any) -> Iterator[Any]:
    """A browser context whose pages share their storage, for pages of our own."""
    context = browser.new_context(accept_downloads=True)
    yield context
    context.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A local Ray cluster of two workers."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # No token in the home folder.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    stop_signal = signal.getsignal(signal.SIGTERM)
    # Ray's sockets lie in it, and the path of a socket may not be long.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _temp_dir=folder,
            object_store_memory=100 << 20,
            log_to_driver=False,
        )
        yield ray
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, stop_signal)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ssh_user(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[SshUser]:
    """Someone who may log in to an OpenSSH server on the loopback."""
    if SSHD is None:
        pytest.skip(MISSING)
    server = Sshd(tmp_path_factory.mktemp("sshd") / "server")
    server.start()
    yield server.user(tmp_path / "user")
    server.stop()

"""A machine to log in to, for the tests that need one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.sshd import MISSING, SSHD, Sshd, SshUser


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """An OpenSSH server for all tests of this process; who stops it starts it again."""
    if SSHD is None:
        pytest.skip(MISSING)
    server = Sshd(tmp_path_factory.mktemp("sshd") / "server")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def ssh_user(sshd: Sshd, tmp_path: Path) -> SshUser:
    """Someone who may log in to it, with an empty home folder."""
    return sshd.user(tmp_path / "user")

"""Machines that do what they are told: this one in another folder, and one that ssh reaches."""

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from stillroom.remote.channel import LocalChannel
from stillroom.remote.machine import Machine
from stillroom.remote.records import Blob
from stillroom.remote.ssh.connection import SshChannel
from stillroom.remote.ssh.host import ChannelHost


def local_host(folder: Path, *, environment: Mapping[str, str] | None = None) -> ChannelHost:
    """A machine whose folder is `folder`, and which has this code and its packages already."""
    channel = LocalChannel(environment={**os.environ, **(environment or {})})
    return ChannelHost(Machine(name="local", folder=str(folder)), channel, python=sys.executable)


def ready_host(machine: Machine) -> ChannelHost:
    """A machine that ssh reaches, and which has this code and its packages already."""
    assert machine.ssh is not None
    return ChannelHost(machine, SshChannel(machine.name, machine.ssh), python=sys.executable)


def blob_of(path: Path) -> Blob:
    """The content of a file, as it is sent."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return Blob(sha256=digest, num_bytes=len(data), source=str(path))

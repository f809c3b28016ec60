"""This machine, seen as another one: commands there are subprocesses in a test's folder."""

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from fakes.source_tree import ROOT
from stillroom.remote.channel import LocalChannel
from stillroom.remote.records import Blob, Machine
from stillroom.remote.ssh.host import ChannelHost


def local_host(folder: Path, *, environment: Mapping[str, str] | None = None) -> ChannelHost:
    """A machine whose folder is `folder`, and which has this code and its packages already."""
    paths = {"PYTHONPATH": f"{ROOT / 'engine'}{os.pathsep}{ROOT / 'server'}"}
    channel = LocalChannel(environment={**os.environ, **paths, **(environment or {})})
    return ChannelHost(Machine(name="local", folder=str(folder)), channel, python=sys.executable)


def blob_of(path: Path) -> Blob:
    """The content of a file, as it is sent."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return Blob(sha256=digest, num_bytes=len(data), source=str(path))

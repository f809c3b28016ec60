"""A follower whose machine is a folder of this one: `python -m fakes.local_follower FOLDER`.

It talks with the program there over pipes. As long as the file `cut` lies in the machine's folder
the machine cannot be reached, and what was connected breaks off.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from stillroom.files import read_json
from stillroom.remote.channel import LocalChannel
from stillroom.remote.follower import __main__ as follower
from stillroom.remote.host import UnreachableError
from stillroom.remote.machine import Machine
from stillroom.remote.records import JobSpec
from stillroom.remote.ssh.host import ChannelHost
from stillroom.run_folder import REMOTE_FILE
from stillroom.secrecy.environments import bare_environment


class CutChannel(LocalChannel):
    """A channel that breaks whenever a file says so."""

    def __init__(self, cut: Path) -> None:
        # A login there has none of the variables here.
        super().__init__(environment=bare_environment())
        self._cut, self._open = cut, list[subprocess.Popen[bytes]]()
        threading.Thread(target=self._watch, daemon=True).start()

    def open(self) -> subprocess.Popen[bytes]:
        if self._cut.exists():
            raise UnreachableError("the machine does not answer", "it is retried")
        process = super().open()
        self._open.append(process)
        return process

    def _watch(self) -> None:
        while True:
            if self._cut.exists():
                for process in self._open:
                    process.kill()
            time.sleep(0.02)


class PreparedHost(ChannelHost):
    """A machine that has everything: the code and the packages of the tests."""

    def prepare(self, spec, report) -> None:
        report("nothing to install")


def open_local(machine: Machine) -> PreparedHost:
    """Returns the machine of a folder."""
    folder = Path(machine.folder)
    python = os.environ.get("STILLROOM_PYTHON_THERE", sys.executable)
    return PreparedHost(machine, CutChannel(folder / "cut"), python=python)


def main() -> None:
    spec = read_json(Path(sys.argv[1]) / REMOTE_FILE, JobSpec)
    follower.open_host = lambda machine, run: open_local(spec.machine)
    sys.exit(follower.main())


if __name__ == "__main__":
    main()

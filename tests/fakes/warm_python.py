"""A stand-in for `python -m` that has loaded torch and transformers beforehand.

Loading them takes longer than most runs of the tests. So one process loads them once, and forks
itself for each program that is to be run; what is forked has its own process id, session, files,
folder and environment, like a process that was started anew. `sys.executable` is then a small
program that asks for the fork and waits for its end; all else it hands on to the real Python.

For tests of a whole chain of runs. Those of the processes themselves start real ones. The workers
of pytest-xdist are forked from it too, as each would load the same libraries.
"""

import fcntl
import gc
import json
import os
import runpy
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from stillroom.processes import process_start

_PYTHON = sys.executable
_LOOK_EVERY_S = 1.0
_CLIENT = """#!{python} -SE
import json, os, socket, sys
words = sys.argv[1:]
while words[:1] in (["-P"], ["-u"]):
    del words[0]
if words[:1] != [{option!r}] or not words[1].startswith({start!r}):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
program = dict(arguments=words, folder=os.getcwd(), environment=dict(os.environ))
data = json.dumps(program).encode()
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    socket.send_fds(line, [len(data).to_bytes(8, "big")], [0, 1, 2])
    line.sendall(data)
    code = int(line.recv(16) or b"1")
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def open_warm_python(folder: Path, *, until: int) -> Path:
    """Returns the program that stands in for Python, and starts its server if nobody has.

    folder: the same for all who share the server. until: the process at whose end it ends too.
    """
    known = folder / "warm_python"
    with (folder / "warm_python.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # no limit: the first test's own limit ends it
        if not known.exists():
            # The path of a socket may not be long.
            parts = Path(tempfile.mkdtemp(prefix="warm-", dir="/tmp"))
            known.write_text(str(_start(parts, until)), encoding="utf-8")
    return Path(known.read_text(encoding="utf-8"))


def _start(folder: Path, until: int) -> Path:
    address, client = folder / "socket", folder / "python"
    for path, option, start in ((client, "-m", "stillroom"), (worker_program(client), "-c", "")):
        text = _CLIENT.format(
            python=sys.executable, address=str(address), option=option, start=start
        )
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    command = [sys.executable, "-P", __file__, str(address), str(client), str(until)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    # It outlives this process, so that nobody waits for it here.
    server.returncode = 0
    assert server.stdout is not None
    with server.stdout as said:
        assert said.readline() == b"ready\n"
    return client


def worker_program(client: Path) -> Path:
    """The program that stands in for `python -c`, beside the one for `python -m`."""
    return client.with_name("worker")


def kill_processes_in(folder: Path) -> None:
    """Kills the processes whose working folder is in this one; detached runs have no parent."""
    for process in psutil.process_iter(["cwd"]):
        where = process.info["cwd"]
        if where is not None and process.pid != os.getpid() and Path(where).is_relative_to(folder):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def wait_for_no_disk(handle: int, *, fsync: Callable[[int], None] = os.fsync) -> None:
    """Stands in for fsync, as no test cuts the power: what is on a disk counts as safe there."""
    kind = os.fstat(handle).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        fsync(handle)


def main() -> None:
    """Loads what takes long, and then forks for every connection."""
    address, client, until = sys.argv[1:]
    _load()
    os.fsync = wait_for_no_disk
    sys.executable = client
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # What is collected in a fork would be copied for it first.
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        serve_until_end(listener, int(until))
    shutil.rmtree(Path(address).parent)


def serve_until_end(listener: socket.socket, owner: int) -> None:
    """Forks for every connection until the process `owner` has ended."""
    listener.settimeout(_LOOK_EVERY_S)
    # One that nobody has waited for yet still has its process id.
    while process_start(owner) is not None:
        try:
            line, _ = listener.accept()
        except TimeoutError:
            continue
        line.setblocking(True)
        if os.fork() == 0:
            listener.close()
            _run_and_tell(line)
        line.close()


def _load() -> None:
    gc.disable()
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import stillroom.evaluate.run
    import stillroom.export.run
    import stillroom.rollout.run
    import stillroom.tools.user.worker
    import stillroom.train.rank_main
    import stillroom.train.run  # noqa: F401
    import stillroom_mcp.answers  # noqa: F401

    _use_demo_models()
    gc.enable()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lose threads"


def _use_demo_models() -> None:
    """Loads them once, so that no fork compiles what transformers keeps for all models, or makes
    the checks that are made once for each kind of model."""
    import torch

    from stillroom.demo import DEMO_MODELS
    from stillroom.models.load import load_model
    from stillroom.models.resolve import locate_model
    from stillroom.policy.check import check_decoding
    from stillroom.settings import Workspace

    torch.set_num_threads(1)
    workspace = Workspace(Path.cwd())
    for name in DEMO_MODELS:
        check_decoding(load_model(workspace, locate_model(workspace, name)))


def _run_and_tell(line: socket.socket) -> None:
    """Runs the program in a process of its own and tells its exit code on the line."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, _, _ = socket.recv_fds(line, 8, 3)
    data = b""
    while len(data) < int.from_bytes(length, "big"):
        data += line.recv(1 << 16)
    if (pid := os.fork()) == 0:
        line.close()
        _become(json.loads(data), files)
    for file in files:
        os.close(file)
    _, status = os.waitpid(pid, 0)  # no limit: it ends with the program that it runs
    try:
        line.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        os._exit(0)


def _become(program: dict[str, Any], files: list[int]) -> None:
    """Turns this process into the program, and ends it with its exit code."""
    code = 1
    try:
        os.setsid()
        for target, file in enumerate(files):
            os.dup2(file, target)
            os.close(file)
        # The old streams take what they write to for the files of the first process.
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        # A fork makes torch's pool of threads anew. Two threads that did so at once would fail.
        torch = sys.modules["torch"]
        torch.set_num_threads(torch.get_num_threads())
        os.chdir(program["folder"])
        os.environ.clear()
        os.environ.update(program["environment"])
        option, *sys.argv = program["arguments"]
        if option == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.executable = _PYTHON
            sys.modules["__main__"] = ModuleType("__main__")
            exec(sys.argv[0], vars(sys.modules["__main__"]))  # noqa: S102
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

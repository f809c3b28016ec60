"""A `docker` command whose containers are processes with an MCP server; it records its calls."""

import json
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from fakes import mcp_servers

_SCRIPT = """#!{python} -SE
import json, os, pathlib, signal, subprocess, sys, time

state, server = pathlib.Path({state!r}), {server!r}
command, arguments = sys.argv[1], sys.argv[2:]
with open(state / "calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")

def values(flag):
    return [arguments[i + 1] for i, word in enumerate(arguments[:-1]) if word == flag]

def fail(text):
    print(text, file=sys.stderr)
    sys.exit(1)

def is_running(name):
    pid = int((state / f"{{name}}.pid").read_text())
    try:
        return open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

name = arguments[-1] if arguments else ""
if command == "info":
    if (state / "no-engine").exists():
        fail("Cannot connect to the daemon")
elif command in ("build", "pull") or arguments[:1] == ["inspect"] and command == "image":
    if "broken" in " ".join(arguments) or "absent" in name:
        fail("no such base image")
elif command == "run":
    [name] = values("--name")
    environment = dict(pair.split("=", 1) for pair in values("--env"))
    if (state / "refuse").exists():
        fail("no space left on device")
    words = ["sh", "-c", "echo no licence found; exit 3"]
    if "dies" not in arguments[-1]:
        words = [sys.executable, "-S", "-E", server, "container", str(state / f"{{name}}.port")]
    with open(state / f"{{name}}.log", "w") as log:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={{**os.environ, **environment}}, start_new_session=True,
        )
    (state / f"{{name}}.pid").write_text(str(child.pid))
    (state / f"{{name}}.labels").write_text("\\n".join(values("--label")))
    print("0123456789ab")
elif command == "port":
    name, file = arguments[0], state / f"{{arguments[0]}}.port"
    while not file.exists() and is_running(name):
        time.sleep(0.005)
    print("127.0.0.1:" + (file.read_text() if file.exists() else "9"))
elif command == "inspect":
    print("true" if is_running(name) else "false")
elif command == "logs":
    print((state / f"{{name}}.log").read_text())
elif command == "ps":
    wanted = values("--filter")[0].removeprefix("label=")
    for file in state.glob("*.labels"):
        if wanted in file.read_text().split("\\n"):
            print(file.stem)
elif command == "rm":
    for name in arguments:
        if (state / f"{{name}}.pid").exists():
            try:
                os.kill(int((state / f"{{name}}.pid").read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass
            for file in state.glob(f"{{name}}.*"):
                file.unlink()
"""


@dataclass(frozen=True, slots=True)
class FakeDocker:
    """The state of a fake engine."""

    folder: Path

    def calls(self, command: str) -> list[list[str]]:
        """The arguments of each call of a command so far."""
        lines = (self.folder / "calls").read_text("utf-8").splitlines()
        return [call[1:] for call in map(json.loads, lines) if call[0] == command]

    def containers(self) -> list[str]:
        """The names of the containers that were not removed."""
        return sorted(file.stem for file in self.folder.glob("*.pid"))

    def pids(self) -> list[int]:
        """Their processes."""
        return [int(file.read_text("utf-8")) for file in self.folder.glob("*.pid")]


def install_docker(folder: Path) -> FakeDocker:
    """Writes the command into `folder`/bin, which is to be put on the path."""
    state, program = folder / "state", folder / "bin" / "docker"
    state.mkdir(parents=True)
    (state / "calls").touch()
    program.parent.mkdir()
    server = str(Path(mcp_servers.__file__).resolve())
    script = _SCRIPT.format(
        python=os.path.realpath(sys.executable), state=str(state), server=server
    )
    program.write_text(script, encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return FakeDocker(state)

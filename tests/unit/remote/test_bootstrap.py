"""An environment is made whole on machines with an old Python, none, or one of their own."""

import fcntl
import os
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from fakes.waiting import wait_until
from stillroom.remote.agent.environment import installation_step
from stillroom.remote.channel import LocalChannel
from stillroom.remote.host import MachineError
from stillroom.remote.machine import Machine
from stillroom.remote.records import JobSpec
from stillroom.remote.ssh.host import ChannelHost
from stillroom.remote.ssh.requirements import (
    LocalPackages,
    PackagesToInstall,
    canonical_versions,
    local_packages,
    packages_to_install,
    run_requirements,
)

NEW = ("python3.14", "python3.13", "python3.12", "python3.11")
NONE = "#!/bin/sh\nexit 127\n"
OLD = """#!/bin/sh
case "$1 $2 $3" in
"-c "*) echo "3.8.10 1 $0" ;;
"-m pip install") mkdir -p "$7/bin" && cp {uv} "$7/bin/uv" ;;
*) exit 1 ;;
esac
"""
# It installs by naming the packages that the suite runs with.
UV = """#!/bin/sh
echo "$@" $UV_TORCH_BACKEND >>{log}
case "$1 $2" in
"python find") echo {python} ;;
"pip install")
  {before}
  site=$("$4" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('{site}')" >"$site/suite.pth" ;;
esac
"""


@dataclass
class Box:
    """A machine without any Python but what a test gives it; its commands run on this one."""

    folder: Path

    def give(self, name: str, text: str) -> Path:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def give_uv(self, name: str = "uv", *, before: str = ":") -> Path:
        site = sysconfig.get_path("purelib")
        text = UV.format(log=self.log, python=sys.executable, site=site, before=before)
        return self.give(name, text)

    @property
    def log(self) -> Path:
        return self.folder / "uv.log"

    @property
    def root(self) -> Path:
        return self.folder / "home" / ".stillroom-remote"

    def installs(self) -> int:
        return self.log.read_text().count(" -r ")

    def variables(self) -> dict[str, str]:
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "HOME": f"{self.folder}/home"}

    def host(self, python: str | None = None, **environment: str) -> ChannelHost:
        channel = LocalChannel(environment=self.variables() | environment)
        return ChannelHost(Machine(name="box", python=python), channel)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    machine = Box(tmp_path)
    for name in (*NEW, "python3", "python"):
        machine.give(name, NONE)
    return machine


def prepare(host: ChannelHost, **spec: list[str]) -> list[str]:
    said = list[str]()
    host.prepare(JobSpec(machine=host.machine, files=[], home_paths=[], **spec), said.append)
    return [text for text in said if text]


def test_a_machine_without_python_says_what_to_install(box: Box):
    host = box.host()

    with pytest.raises(MachineError, match="box has no Python") as caught:
        prepare(host)

    assert "apt-get install python3 python3-venv" in caught.value.fix
    assert "uv" in caught.value.fix
    assert "`python:` in machines.yml" in caught.value.fix
    assert host.facts().python is None
    assert not box.root.exists()


def test_gpus_are_named_with_their_memory(box: Box):
    lines = "81559, 570.86.15, NVIDIA H100 80GB HBM3\n[N/A], 570.86.15, NVIDIA GB10\n"
    box.give("nvidia-smi", f"#!/bin/sh\nprintf %s '{lines}'")

    facts = box.host().facts()

    assert facts.gpus == ["NVIDIA H100 80GB HBM3, 79.6 GB", "NVIDIA GB10, 0.0 GB"]
    assert facts.gpu_memory_gb == [79.6, 0.0]
    assert facts.driver == "570.86.15"


def test_a_machine_with_an_old_python_gets_uv_from_its_pip_and_a_python_from_uv(box: Box):
    box.give("python3", OLD.format(uv=box.give_uv("fetched")))
    host = box.host()
    before = host.facts()

    said = prepare(host, extras=["train"])

    assert (before.python_version, before.has_uv) == ("3.8.10", False)
    assert said == [
        "install uv",
        "install Python",
        "upload code",
    ]
    assert host.missing([]) == {}
    version = ".".join(map(str, sys.version_info[:2]))
    install = box.log.read_text().splitlines()
    assert install[:2] == [f"python install -q {version}", f"python find {version}"]
    assert install[2].startswith(f"pip install --python {box.root}/packages/")
    assert install[2].endswith(" auto")
    [requirements] = box.root.glob("packages/*/requirements.txt")
    here = local_packages().versions
    assert f"msgspec=={here['msgspec']}" in requirements.read_text().splitlines()
    assert f"torch=={here['torch'].partition('+')[0]}" in requirements.read_text().splitlines()

    [code] = box.root.glob("code/*/stillroom")
    code.parent.rename(code.parent.with_name("other"))  # As an earlier version would have left it.
    code.parent.with_name("other.python").touch()
    os.utime(code.parent.with_name("other.python"), (1, 1))
    prepare(host, extras=["train"])

    assert host.missing([]) == {}
    assert not code.parent.with_name("other").exists()  # Nobody has used it for months.
    assert box.installs() == 1  # New code costs no installation.


def test_an_old_python_without_pip_is_named_with_its_version(box: Box):
    box.give("python3", OLD.replace("mkdir", "exit 1; mkdir").format(uv="none"))

    with pytest.raises(MachineError, match=r"has only Python 3\.8\.10, and uv could not"):
        prepare(box.host())


def test_a_given_python_that_is_too_old_is_refused(box: Box):
    old = box.give("old", OLD)

    with pytest.raises(MachineError, match=r"is Python 3\.8\.10, but stillroom needs"):
        prepare(box.host(str(old)))


def test_an_installation_that_failed_is_quoted_and_begun_anew(box: Box):
    box.give_uv(before="echo No solution found for torch; exit 1")
    with pytest.raises(MachineError, match="No solution found for torch") as caught:
        prepare(box.host())
    assert "packages could not be installed on box" in caught.value.problem
    assert "full log: " in caught.value.problem
    assert "package index" in caught.value.fix
    [half] = box.root.glob("packages/*/bin")
    (half / "left_over").touch()

    box.give_uv()
    host = box.host()
    prepare(host)

    assert host.missing([]) == {}
    assert not (half / "left_over").exists()
    [installed] = box.root.glob("packages/*/lib/*/site-packages/suite.pth")
    installed.unlink()  # As on a machine where a job deletes old files.
    prepare(host)
    assert host.missing([]) == {}
    assert box.installs() == 3


def test_uv_trusts_whom_the_system_trusts_where_its_own_list_is_not_enough(box: Box):
    box.give_uv(before='[ "$UV_SYSTEM_CERTS" ] || { echo invalid peer certificate; exit 1; }')

    prepare(box.host())

    assert box.installs() == 2


@pytest.mark.parametrize("answer", ["[[[[" * 50_000, "Welcome!", "", "[]", '{"code": 1}'])
def test_what_is_no_answer_to_the_installer_is_quoted(box: Box, answer: str):
    (box.folder / "answer").write_text(f"{answer}\n")
    text = f'[ "$1" = -c ] && echo "3.12.1 1 $0" && exit; cat {box.folder}/answer'
    box.give("python3", f"#!/bin/sh\n{text}\n")
    box.give_uv()

    with pytest.raises(
        MachineError, match=r"box sent .* instead of a reply of stillroom's installer"
    ):
        prepare(box.host())


def test_an_installation_without_room_says_so(box: Box):
    box.give_uv(before="echo No space left on device >&2; exit 1")

    with pytest.raises(MachineError, match="the disk of box is full"):
        prepare(box.host())


def test_a_killed_installation_is_begun_anew(box: Box):
    # The installer goes on for a while, and nobody deletes what it writes.
    box.give_uv(before=f"kill -9 $PPID; sleep 0.5; date +%s%N >{box.folder}/written")
    with pytest.raises(MachineError, match="killed by signal 9"):
        prepare(box.host())

    box.give_uv(before=f"[ -e {box.folder}/written ] || exit 1")
    host = box.host()
    prepare(host)

    assert host.missing([]) == {}


def test_an_installation_goes_on_without_a_connection_when_nobody_listens(box: Box):
    waiting = f"for n in $(seq 600); do [ -e {box.folder}/go ] && break; sleep 0.1; done"
    box.give_uv(before=f"touch {box.folder}/begun; {waiting}")
    program = f"""
import os
from stillroom.remote.channel import LocalChannel
from stillroom.remote.machine import Machine
from stillroom.remote.ssh import bootstrap
channel = LocalChannel(environment={box.variables()!r})
bootstrap.prepare(channel, Machine(name="box"), None, print)
"""
    listening = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    wait_until((box.folder / "begun").exists)
    talking = psutil.Process(listening.pid).children()
    listening.kill()
    listening.wait(10)

    assert talking
    assert psutil.wait_procs(talking, timeout=30)[1] == []
    assert not any(box.root.glob("packages/*/whole"))
    (box.folder / "go").touch()
    wait_until(lambda: any(box.root.glob("packages/*/whole")))
    prepare(box.host())
    assert box.installs() == 1


def test_a_run_that_needs_fewer_packages_than_an_earlier_one_installs_nothing(box: Box):
    box.give_uv()
    host = box.host()
    prepare(host, extras=["train", "gguf"])
    prepare(host, extras=["train"])

    assert host.missing([]) == {}
    assert box.installs() == 1
    prepare(host, extras=["train", "browse"])
    assert box.installs() == 2


def test_a_run_that_shares_the_packages_of_one_that_needed_more_installs_its_own_if_they_are_broken(
    box: Box,
):
    box.give_uv()
    host = box.host()
    prepare(host, extras=["train", "gguf"])
    [packages] = box.root.glob("packages/*/lib/*/site-packages/suite.pth")
    packages.unlink()
    prepare(host, extras=["train"])

    assert host.missing([]) == {}
    assert box.installs() == 2


def test_a_run_does_not_install_fewer_packages_in_the_place_of_those_it_would_share(box: Box):
    box.give_uv()
    host = box.host()
    prepare(host, extras=["train", "gguf"])
    [mark] = box.root.glob("packages/*/whole")
    packages = mark.parent
    with (packages.parent / f".{packages.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

        def fail_to_install_again(text: str) -> None:
            if "another run" in text:
                mark.unlink()
                fcntl.flock(lock, fcntl.LOCK_UN)

        spec = JobSpec(machine=host.machine, files=[], home_paths=[], extras=["train"])
        host.prepare(spec, fail_to_install_again)

    assert "gguf" in (packages / "requirements.txt").read_text()


def test_packages_that_an_environment_shares_are_not_deleted_while_it_is_used(box: Box):
    box.give_uv()
    host = box.host()
    prepare(host, extras=["train", "gguf"])
    prepare(host, extras=["train", "browse"])
    first, second = sorted(box.root.glob("packages/*/whole"))
    first.rename(first.with_name("hidden"))
    prepare(host, extras=["train"])
    first.with_name("hidden").rename(first)
    long_ago = time.time() - 61 * 86400
    for mark in (first, second):
        os.utime(mark, (long_ago, long_ago))

    prepare(host, extras=["train"])

    assert second.exists()
    assert host.missing([]) == {}


@pytest.mark.thorough  # its processes begin in threads, where --quick cannot skip it
def test_two_runs_that_begin_at_once_install_once(box: Box):
    box.give_uv(before="sleep 0.5")
    hosts = [box.host(), box.host()]
    threads = [threading.Thread(target=prepare, args=[host]) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert [host.missing([]) for host in hosts] == [{}, {}]
    assert box.installs() == 1


def test_of_a_given_python_the_packages_are_used_and_the_missing_ones_installed(box: Box):
    index = box.folder / "index"
    index.mkdir()
    write_wheel(index)
    host = box.host(
        sys.executable, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index), PIP_CONFIG_FILE="/"
    )

    prepare(host, extras=["train"], packages=["tiny-there==1.0"])

    assert host.missing([]) == {}
    [installed] = box.root.glob("packages/*/lib/*/site-packages/tiny_there.py")
    packages = {path.name for path in installed.parent.glob("*.dist-info")}
    assert packages == {"tiny_there-1.0.dist-info"}


def write_wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "tiny_there-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_there.py", "")
        about = "tiny_there-1.0.dist-info"
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-there\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")


HERE = {
    "torch": "2.9.0+cpu",
    "numpy": "2.3.1",
    "nvidia-nccl": "2.27",
    "triton": "3.5",
    "rapid": "1",
}


def to_install(*requirements: str, there: dict[str, str] | None = None):
    return packages_to_install(
        [Requirement(each) for each in requirements], local=HERE, remote=there or {}
    )


def test_what_comes_along_has_the_versions_here_but_for_what_torchs_build_decides():
    assert to_install("rapid").constraints == ["numpy==2.3.1", "torch==2.9.0"]


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("torch>=2.6", "torch==2.9.0"),
        ("absent>=3", "absent>=3"),
        ("numpy<2", "numpy<2"),  # What is installed here does not fit.
        ("Rapid[fast]", "Rapid[fast]==1"),
        ("mine @ https://example.org/mine.whl", "mine @ https://example.org/mine.whl"),
    ],
)
def test_the_version_here_is_installed_without_its_build_if_it_fits(requirement, expected):
    assert to_install(requirement).requirements == [expected]


def test_what_an_image_has_stays_and_its_torch_above_all():
    there = {"torch": "2.6.0+cu124", "numpy": "1.26.4"}

    assert to_install("torch>=2.6", "numpy", there=there) == PackagesToInstall([], [])
    added = to_install("torch>=2.6", "rapid", there=there)
    assert added == PackagesToInstall(["rapid==1"], ["torch==2.6.0"])


def test_what_an_image_has_too_old_is_installed_beside_it():
    added = to_install("torch>=2.6", "numpy==2.3.1", there={"torch": "2.6.0", "numpy": "1.26.4"})

    assert added.requirements == ["numpy==2.3.1"]
    assert "numpy==1.26.4" not in added.constraints


@pytest.mark.parametrize(
    ("condition", "version", "expected"),
    [
        ('sys_platform != "win32"', "3.12.1", []),
        ('sys_platform != "win32"', "3.11.9", ["rapid"]),
        ('sys_platform == "win32"', "3.11.9", []),
        ('extra == "traces"', "3.12.1", []),
        ('extra == "traces"', "3.11.9", ["rapid"]),
        ('extra == "train"', "3.11.9", []),
    ],
)
def test_conditions_are_those_of_the_machine(condition, version, expected):
    line = f'rapid; python_version < "3.12" and {condition}'
    local = LocalPackages(requires=[line], versions={})

    found = run_requirements(local, ["traces"], [], python_version=version)

    assert [requirement.name for requirement in found] == expected


def test_an_extra_brings_its_packages():
    def names(*extras: str, packages: tuple[str, ...] = ()) -> set[str]:
        found = run_requirements(local_packages(), extras, packages, python_version="3.12.1")
        return {requirement.name for requirement in found}

    assert "msgspec" in names()
    assert "torch" not in names()
    assert {"msgspec", "torch", "peft"} <= names("train")
    assert {"torch", "playwright"} <= names("train", "browse")
    assert "rapidfuzz" in names(packages=("rapidfuzz==3.9",))


def test_the_first_of_two_installations_counts_and_odd_versions_are_passed_over():
    found = [("Torch", "2.9.0"), ("torch", "1.0"), ("odd", "not a version"), ("My_Tool", "1")]

    assert canonical_versions(found) == {"torch": "2.9.0", "my-tool": "1"}


def test_of_an_installers_log_the_last_step_is_shown() -> None:
    log = "Collecting torch\n  Downloading torch-2.13.0.whl (84 MB)\nWARNING: '/x' is ignored\n"

    assert installation_step(log) == "Downloading torch-2.13.0.whl (84 MB)"
    assert installation_step("Successfully uninstalled setuptools-65.5.0") == ""

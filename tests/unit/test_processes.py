import socket
import subprocess
import sys

import pytest

from fakes.warm_python import serve_until_end
from stillroom.processes import end_process

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
WAITING = "print('waits', flush=True); time.sleep(60)"
PEAK = """
from stillroom.processes import peak_memory_bytes
before = peak_memory_bytes()
held = bytearray(100 << 20)
print(before, peak_memory_bytes())
"""


@pytest.mark.parametrize(("program", "code"), [("import time\n", -15), (STUBBORN, -9)])
def test_a_process_that_does_not_terminate_is_killed(program, code):
    command = [sys.executable, "-c", program + WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        end_process(process, grace_s=0.5)
        assert process.returncode == code


def test_a_process_that_has_ended_keeps_its_exit_code():
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        process.wait(30)
        end_process(process)
    assert process.returncode == 3


def test_the_warm_python_of_a_process_ends_with_it_although_nobody_waits_for_that_process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        assert owner.stdin is not None
        owner.stdin.close()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serve_until_end(listener, owner.pid)
        assert owner.returncode is None


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_the_peak_memory_is_the_processs_own_and_not_that_of_who_started_it():
    held = bytearray(300 << 20)
    reported = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    before, after = map(int, reported.split())

    assert len(held) > after
    assert 0 < before < 0.1e9
    assert after - before == pytest.approx(100 << 20, abs=5 << 20)

"""How much memory a process has taken, whoever started it."""

import subprocess
import sys

import pytest

PEAK = """
import torch
from stillroom.train.student.model import peak_memory_gb
before = peak_memory_gb(torch.device("cpu"))
held = bytearray(400 << 20)
print(before, peak_memory_gb(torch.device("cpu")))
"""


def peaks() -> tuple[float, float]:
    reported = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    before, after = map(float, reported.split())
    return before, after


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_the_peak_is_the_process_s_own_and_not_that_of_who_started_it() -> None:
    held = bytearray(1 << 30)
    before, after = peaks()
    num_held = len(held)
    assert num_held > 1e9 * after
    assert 0.05 < before < 1.0
    assert after - before == pytest.approx(0.42, abs=0.1)

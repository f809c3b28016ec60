"""What the processes that train together write to their logs."""

import signal
import subprocess
from pathlib import Path

from fakes.user_files import wait_for
from fakes.waiting import run_async
from fakes.warm_python import worker_program

KEY = "sk-live-0123456789abcdef"
PRINTS = f"""
import os, signal, sys
from pathlib import Path
from stillroom.secrecy.redaction import Redactor
from stillroom.train.rank_main import redirect_output

redirect_output(Path(sys.argv[1]), Redactor(["{KEY}"]))
print("asked with {KEY}", flush=True)
os.write(2, b"the library says {KEY[:9]}")
os.write(2, b"{KEY[9:]}\\nlast words")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_log_of_a_killed_process_has_its_last_words_and_no_key(
    tmp_path: Path, warm_program: Path
) -> None:
    log, python = tmp_path / "rank_0.log", worker_program(warm_program)

    done = subprocess.run(
        [str(python), "-c", PRINTS, str(log)], capture_output=True, check=False, timeout=60
    )

    assert done.returncode == -signal.SIGKILL, done.stderr
    run_async(wait_for, lambda: log.read_bytes().endswith(b"last words"))
    text = log.read_text(encoding="utf-8")
    assert KEY not in text
    assert text.count("asked with ") == text.count("the library says ") == 1
    assert len(text.splitlines()) == 3

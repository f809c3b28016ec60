import json

import pytest

from fakes.gguf_files import write_gguf
from stillroom.errors import ModelError
from stillroom.lineage import record_folder
from stillroom.models.hash_cache import HashCache
from stillroom.models.resolve import check_available, identify, locate_model
from stillroom.settings import Workspace


def model_folder(folder, file="config.json"):
    folder.mkdir(parents=True)
    (folder / file).write_text("{}", encoding="utf-8")
    return folder


def run_folder(root, name, *checkpoints):
    run = root / "runs" / name
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}", encoding="utf-8")
    for checkpoint in checkpoints:
        model_folder(run / "checkpoints" / checkpoint)
    return run


def test_a_folder_in_the_workspace_is_that_model(tmp_path):
    folder = model_folder(tmp_path / "models" / "mine")

    found = locate_model(Workspace(tmp_path), "models/mine")

    assert found.name == "models/mine"
    assert found.path == folder.resolve()
    assert found.is_local
    assert not found.is_adapter


@pytest.mark.parametrize("name", ["run-1", "runs/run-1"])
def test_a_run_is_its_final_checkpoint(tmp_path, name):
    run = run_folder(tmp_path, "run-1", "step_000010", "final")

    assert locate_model(Workspace(tmp_path), name).path == run / "checkpoints" / "final"


@pytest.mark.parametrize("name", ["run-1", "runs/run-1"])
def test_an_unfinished_run_names_its_newest_checkpoint(tmp_path, name):
    run_folder(tmp_path, "run-1", "step_000010", "step_000020", ".step_000030.partial")

    with pytest.raises(ModelError, match="no final checkpoint") as caught:
        locate_model(Workspace(tmp_path), name)
    assert "runs/run-1/checkpoints/step_000020" in caught.value.fix


def test_a_name_with_a_slash_that_is_no_folder_is_a_hub_model(tmp_path):
    found = locate_model(Workspace(tmp_path), "Qwen/Qwen3-0.6B")

    assert not found.is_local
    assert not found.is_adapter
    assert found.location == "Qwen/Qwen3-0.6B"


def test_a_local_folder_comes_before_a_hub_model_of_the_same_name(tmp_path):
    folder = model_folder(tmp_path / "Qwen" / "Qwen3-0.6B")

    assert locate_model(Workspace(tmp_path), "Qwen/Qwen3-0.6B").path == folder


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "/not/there", "", "https://x/y"])
def test_what_is_no_model_is_refused_with_what_would_be_accepted(tmp_path, name):
    with pytest.raises(ModelError) as caught:
        locate_model(Workspace(tmp_path), name)
    assert "config.json" in caught.value.fix
    assert "demo/student" in caught.value.fix


def test_a_folder_without_a_model_is_refused_by_its_path(tmp_path):
    (tmp_path / "data").mkdir()

    with pytest.raises(ModelError, match=r"data is not a model: it has neither config\.json"):
        locate_model(Workspace(tmp_path), "data")


def test_a_models_id_at_a_hosted_service_is_told_apart_from_a_hub_id(tmp_path):
    with pytest.raises(ModelError, match="a model id of a hosted service") as caught:
        locate_model(Workspace(tmp_path), "acfa2862-23a9-4e65-ab68-b9b2698b0e75")

    assert "download the weights" in caught.value.fix


def test_an_installed_package_with_one_gguf_file_is_that_model(tmp_path, monkeypatch, tiny_models):
    packages = tmp_path / "packages"
    folder = packages / "tiny_model-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Name: tiny-model\nVersion: 1.0\n", encoding="utf-8")
    (folder / "RECORD").write_text("tiny_model/one.gguf,,\ntiny_model/x.py,,\n", encoding="utf-8")
    (packages / "tiny_model").mkdir()
    file = packages / "tiny_model" / "one.gguf"
    write_gguf(file, tiny_models.load("llama", tie_word_embeddings=True))
    monkeypatch.syspath_prepend(packages)

    found = locate_model(Workspace(tmp_path), "tiny-model")

    assert (found.name, found.path, found.is_gguf) == ("tiny-model", file, True)
    # A package without one, such as this test's own, is no model.
    with pytest.raises(ModelError, match="or installed package with a GGUF file"):
        locate_model(Workspace(tmp_path), "pytest")


def test_a_model_that_the_hub_does_not_have_is_refused(tmp_path):
    workspace = Workspace(tmp_path)
    check_available(locate_model(workspace, "demo/student"))

    with pytest.raises(ModelError, match="cannot get the model 'none/such' from") as caught:
        check_available(locate_model(workspace, "none/such"))

    assert "a GGUF file" in caught.value.fix


def test_weights_that_have_not_changed_are_not_hashed_again(tmp_path):
    folder = model_folder(tmp_path / "base")
    workspace, weights = Workspace(tmp_path), folder / "model.safetensors"
    weights.write_bytes(b"weights")
    location = locate_model(workspace, "base")
    before = identify(workspace, location, role="base")
    cache = tmp_path / ".stillroom" / "hashes.json"
    # The files changed a moment ago, so that they may change again within a tick of the clock.
    assert not cache.exists()
    hashes = HashCache(cache, settled_after_s=0)
    hashes.hash_of(weights)
    hashes.save()
    stamp, _ = json.loads(cache.read_bytes())[str(weights)]
    cache.write_text(json.dumps({str(weights): [stamp, "as it was known"]}), encoding="utf-8")

    known = identify(workspace, location, role="base").sha256

    assert known == record_folder(folder, hash_of=HashCache(cache).hash_of).sha256 != before.sha256
    weights.write_bytes(b"changed")
    changed = identify(workspace, location, role="base").sha256
    assert changed == record_folder(folder).sha256 != before.sha256

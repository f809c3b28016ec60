"""A run on another machine is sent what it reads, once, and nothing that must stay here."""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

from fakes.conversations import answer, user
from fakes.elsewhere import away, box, lay_out, own_machine, packed_run
from fakes.gguf_files import write_gguf
from fakes.run_folders import answer as evaluated
from fakes.run_folders import write_evaluation
from fakes.training import make_project, write_run_files
from stillroom.errors import InputError, RunError
from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.export.folder import MANIFEST, ExportManifest
from stillroom.files import file_sha256, write_json
from stillroom.home_paths import home_variable
from stillroom.lineage import write_manifest
from stillroom.models import hash_cache
from stillroom.models.hash_cache import HashCache
from stillroom.models.resolve import RECORD, CheckpointRecord, identify, locate_model
from stillroom.remote.bundle.job_spec import pack
from stillroom.remote.bundle.layout import read_contents
from stillroom.remote.bundle.needs import (
    Needs,
    needs_of_evaluation,
    needs_of_generation,
    needs_of_training,
)
from stillroom.remote.machines import users_machines_file
from stillroom.rollout.plan import plan_generation
from stillroom.rollout.request import GenerateRollouts
from stillroom.run_folder import LIMITS_FILE, create_run
from stillroom.secrecy.keys import keys_file, tool_variables
from stillroom.settings import Workspace
from stillroom.teachers.run_limits import RunLimits, usd_per_hour_of
from stillroom.tools.user.file import read_user_file
from stillroom.train.config.request import StartTraining, plan_request
from stillroom.train.config.resume import STATE, BestValidation, read_state
from stillroom.types import RunKind, RunStatus
from stillroom.versions import tag_file

ROWS = [{"messages": [user("Hello?"), answer("Yes.")]}]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("STILLROOM_CONFIG", str(tmp_path / "own"))
    own_machine()
    (tmp_path / "work").mkdir()
    return Workspace(tmp_path / "work")


def written(path: Path, text: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    an_hour_ago = time.time() - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    return path


def model_folder(path: Path) -> Path:
    written(path / "config.json", "{}")
    written(path / "model.safetensors", path.name)
    return path


def places_of(workspace: Workspace, needs: Needs) -> list[str]:
    return [file.remote_path for file in pack(workspace, box(workspace), needs).spec.files]


def test_files_of_one_name_do_not_meet_and_keep_what_they_stand_for(tmp_path, workspace):
    inside = [written(workspace.root / name / "train.jsonl", name) for name in "ab"]
    outside = [written(tmp_path / name / "train.jsonl", name) for name in "cd"]
    packed, run = packed_run(workspace, Needs(files=[inside[0].parent, inside[1], *outside]))
    base = tmp_path / "there"
    lay_out(run, packed.spec, base)
    assert (base / "workspace/b/train.jsonl").read_text() == "b"
    assert (base / f"outside{tmp_path}/d/train.jsonl").read_text() == "d"
    assert len(packed.spec.files) == 4


def test_manifests_tags_and_prices_go_with_a_file(tmp_path, workspace):
    rows = written(workspace.root / "train.jsonl", "one")
    written(workspace.root / "train.jsonl.manifest.json", "{}")
    written(workspace.root / "prices.yml", "{}")
    tag_file(workspace.root, rows, "v1", created_at="2026-01-01T00:00:00.000Z", manifest=None)
    written(rows, "two")
    kept = workspace.existing("train@v1", label="input")
    packed, run = packed_run(workspace, Needs(files=[kept]))
    assert sorted(file.remote_path for file in packed.spec.files) == [
        f"workspace/.stillroom/datasets/{kept.name}",
        "workspace/.stillroom/tags/train.jsonl@v1.json",
        "workspace/prices.yml",
    ]
    assert sorted(places_of(workspace, Needs(files=[rows]))) == [
        "workspace/.stillroom/tags/train.jsonl@v1.json",
        "workspace/prices.yml",
        "workspace/train.jsonl",
        "workspace/train.jsonl.manifest.json",
    ]
    # Elsewhere too the version is found by its name.
    lay_out(run, packed.spec, tmp_path / "there")
    there = Workspace(tmp_path / "there" / "workspace")
    assert there.existing("train@v1", label="input").read_text() == "one"


def test_a_models_run_and_the_base_of_an_adapter_go_with_it(tmp_path, workspace, tiny_models):
    base = tiny_models.folder("llama", "chatml")
    project = make_project(workspace.root, "sft", base, model={"qlora_rank": 2})
    project.write(ROWS)
    project.train("run-1")
    adapter = locate_model(workspace, "run-1")
    places = places_of(workspace, Needs(models=[adapter, locate_model(workspace, "demo/student")]))
    assert "workspace/runs/run-1/run.json" in places
    assert "workspace/runs/run-1/checkpoints/final/adapter_model.safetensors" in places
    assert "workspace/runs/run-1/checkpoints/final/stillroom.manifest.json" in places
    assert f"outside{base}/model.safetensors" in places
    # What is part of Stillroom is there already.
    assert not [place for place in places if "demo" in place]


def test_a_gguf_file_goes_as_it_is_and_is_converted_elsewhere(tmp_path, workspace, tiny_models):
    real = write_gguf(tmp_path / "tiny.gguf", tiny_models.load("llama"))
    (workspace.root / "link.gguf").symlink_to(real)
    project = make_project(workspace.root, "sft", Path("link.gguf"))
    project.write(ROWS)
    project.write_config()
    request = StartTraining()
    needs = needs_of_training(request, plan_request(workspace, request))

    packed, run = packed_run(workspace, Needs(models=needs.models, extras=needs.extras))
    base = tmp_path / "there"
    variable = lay_out(run, packed.spec, base)

    assert [place for place in places_of(workspace, needs) if place.endswith("gguf")] == [
        f"outside{real}"
    ]
    assert "gguf" in packed.spec.extras
    with away(variable):
        for name in ("link.gguf", str(real)):
            remote = Workspace(base / "workspace")
            location = locate_model(remote, name)
            assert location.path == base / f"outside{real}"
            record = identify(remote, location, role="student")
            assert (record.location, record.sha256) == (str(real), file_sha256(real))
    student = make_project(workspace.root, "sft", Path("demo/student"))
    student.write_config()
    assert needs_of_training(request, plan_request(workspace, request)).extras == ["train"]


def test_an_adapter_on_a_gguf_file_gets_the_package_that_reads_it(workspace, tiny_models):
    real = write_gguf(workspace.root / "tiny.gguf", tiny_models.load("llama"))
    adapter = workspace.root / "adapter"
    written(adapter / "adapter_config.json", json.dumps({"base_model_name_or_path": str(real)}))
    written(adapter / "adapter_model.safetensors")

    for name, extras in {"adapter": ["train", "gguf"], "demo/student": ["train"]}.items():
        needs = Needs(models=[locate_model(workspace, name)], extras=["train"])
        assert pack(workspace, box(workspace), needs).spec.extras == extras


def test_a_gguf_file_whose_chat_template_is_taken_gets_the_package_that_reads_it(
    workspace, tiny_models
):
    write_gguf(workspace.root / "tiny.gguf", tiny_models.load("llama"))

    for name, extras in {"tiny.gguf": ["train", "gguf"], "demo/student": ["train"]}.items():
        needs = Needs(tokenizers=[name, "no/such/model"], extras=["train"])
        assert pack(workspace, box(workspace), needs).spec.extras == extras


def test_the_gguf_file_of_a_python_package_is_found_where_the_package_is_missing(
    tmp_path, workspace, tiny_models, monkeypatch
):
    packages = tmp_path / "packages"
    about = packages / "tiny_model-1.0.dist-info"
    written(about / "METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    written(about / "RECORD", "tiny.gguf,,\n")
    real = write_gguf(packages / "tiny.gguf", tiny_models.load("llama"))
    monkeypatch.syspath_prepend(str(packages))
    packed, run = packed_run(workspace, Needs(models=[locate_model(workspace, "tiny-model")]))
    variable = lay_out(run, packed.spec, tmp_path / "there")

    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(packages)])
    with away(variable):
        there = Workspace(tmp_path / "there" / "workspace")
        location = locate_model(there, "tiny-model")
        assert location.path == tmp_path / "there" / f"outside{real}"
        assert identify(there, location, role="student").location == str(real)


def test_the_chat_template_of_a_student_goes_with_it_without_its_models_weights(workspace):
    other = model_folder(workspace.root / "other")
    with (other / "model.safetensors").open("wb") as weights:
        weights.truncate(1 << 30)
    written(workspace.root / "mine.jinja")
    project = make_project(workspace.root, "sft", Path("demo/student"))
    project.write(ROWS)
    request = StartTraining()

    def sent(template: str) -> list[str]:
        project.config["model"]["chat_template"] = template
        project.write_config()
        needs = needs_of_training(request, plan_request(workspace, request))
        return places_of(workspace, Needs(files=needs.files, tokenizers=needs.tokenizers))

    def sent_for_evaluation(template: str) -> list[str]:
        request = EvaluateModel(data="train.jsonl", model="demo/student", chat_template=template)
        needs = needs_of_evaluation(plan_evaluation(workspace, request))
        return places_of(workspace, Needs(files=needs.files, tokenizers=needs.tokenizers))

    rows = ["workspace/train.jsonl"]
    for places in (sent, sent_for_evaluation):
        assert places("mine.jinja") == [*rows, "workspace/mine.jinja"]
        assert places("other") == [*rows, "workspace/other/config.json"]
        assert places("chatml") == rows


def test_a_run_goes_on_elsewhere_from_its_last_checkpoint(workspace, tiny_models):
    start = tiny_models.folder("llama", "chatml")
    project = make_project(workspace.root, "sft", start, trainer={"save_step": 1, "num_epochs": 2})
    project.write(ROWS)
    project.train("run-1")
    # It ended early, and so did the next one, before its first checkpoint.
    write_run_files(workspace.runs / "run-1", StartTraining(), RunStatus.FAILED)
    (workspace.runs / "run-2").mkdir()
    resumed = StartTraining(resume="run-1")
    write_run_files(workspace.runs / "run-2", resumed, RunStatus.FAILED)

    request = StartTraining(resume="run-2")
    needs = needs_of_training(request, plan_request(workspace, request))
    places = places_of(workspace, needs)
    assert "workspace/runs/run-2/request.json" in places
    assert "workspace/runs/run-1/run.json" in places
    checkpoints = {place.split("/")[4] for place in places if "checkpoints" in place}
    assert checkpoints == {"step_000001"}
    assert "workspace/config.yml" in places


def test_a_run_with_early_stop_goes_on_elsewhere_with_its_best_checkpoint_too(
    workspace, tiny_models
):
    start = tiny_models.folder("llama", "chatml")
    project = make_project(workspace.root, "sft", start, trainer={"save_step": 1, "num_epochs": 3})
    project.write(ROWS)
    project.train("run-1")
    write_run_files(workspace.runs / "run-1", StartTraining(), RunStatus.FAILED)
    newest = project.checkpoint("step_000002")
    best = BestValidation(best_loss=1.0, best_step=1, num_worse=1)
    state = msgspec.structs.replace(read_state(newest), validation=best)
    write_json(newest / STATE, state)

    request = StartTraining(resume="run-1")
    places = places_of(workspace, needs_of_training(request, plan_request(workspace, request)))

    checkpoints = {place.split("/")[4] for place in places if "checkpoints" in place}
    assert checkpoints == {"step_000001", "step_000002"}


def test_an_unfinished_output_goes_with_its_journal_and_comes_back(workspace):
    written(workspace.root / "prompts.jsonl", '{"prompt": "Hello?"}\n')
    request = GenerateRollouts(
        input="prompts.jsonl", output="out/rows.jsonl", model="teacher", provider="demo"
    )
    plan = plan_generation(workspace, request)
    written(workspace.root / "out/rows.jsonl", "{}\n")
    written(workspace.root / "out/.rows.jsonl/journal.jsonl")
    written(workspace.root / "out/.rows.jsonl/settings.json", "{}")
    spec = pack(workspace, box(workspace), needs_of_generation(plan)).spec
    assert spec.outputs == ["out/rows.jsonl"]
    assert {file.remote_path for file in spec.files} >= {
        "workspace/out/rows.jsonl",
        "workspace/out/.rows.jsonl/journal.jsonl",
        "workspace/out/.rows.jsonl/settings.json",
    }


def test_what_has_not_changed_is_not_hashed_again(workspace):
    rows = written(workspace.root / "rows.jsonl")
    packed, run = packed_run(workspace, Needs(files=[rows]))
    cache = workspace.root / ".stillroom" / "hashes.json"
    read_contents(run, packed.spec)
    # A file that was changed a moment ago may change again within the same tick of the clock.
    assert not cache.exists()
    known = HashCache(cache, settled_after_s=0)
    true_hash = known.hash_of(rows)
    known.save()
    stamp, _ = json.loads(cache.read_bytes())[str(rows)]
    cache.write_text(json.dumps({str(rows): [stamp, "as it was known"]}), encoding="utf-8")
    assert HashCache(cache).hash_of(rows) == "as it was known"
    rows.write_text("other", encoding="utf-8")
    assert HashCache(cache).hash_of(rows) not in ("as it was known", true_hash)


def test_a_hash_of_a_file_that_changed_just_before_is_not_kept_however_long_it_takes(
    workspace, monkeypatch
):
    rows, cache = written(workspace.root / "rows.jsonl"), workspace.root / "hashes.json"
    clock = [time.time()]
    monkeypatch.setattr(hash_cache.time, "time", lambda: clock[-1])
    hashes = HashCache(cache)
    # Each block that is read takes a minute.
    hashes.hash_of(rows, lambda: clock.append(clock[-1] + 60))
    hashes.save()
    assert len(clock) > 1
    assert not cache.exists()


def test_a_hash_that_a_cancellation_cut_short_is_not_kept(workspace):
    rows, cache = written(workspace.root / "rows.jsonl"), workspace.root / "hashes.json"
    cancelled = HashCache(cache, settled_after_s=0)
    cancelled.hash_of(rows, lambda: True)
    cancelled.save()
    assert HashCache(cache).hash_of(rows) == file_sha256(rows)


def test_a_file_that_changes_before_it_is_sent_ends_the_run(workspace):
    rows = written(workspace.root / "train.jsonl", "one")
    packed, run = packed_run(workspace, Needs(files=[rows]))
    rows.write_text("three", encoding="utf-8")
    with pytest.raises(RunError, match="has changed since this run was started"):
        read_contents(run, packed.spec)
    rows.unlink()
    with pytest.raises(RunError, match="has changed since this run was started"):
        read_contents(run, packed.spec)


def test_equal_contents_are_sent_once(workspace):
    files = [written(workspace.root / f"{i}.jsonl", "same") for i in range(3)]
    packed, run = packed_run(workspace, Needs(files=files))
    contents = read_contents(run, packed.spec)
    assert (len(contents.blobs), len(contents.files)) == (1, 3)


def code(workspace: Workspace, text: str, **modules: str) -> Needs:
    for name, body in modules.items():
        written(workspace.root / f"{name}.py", body)
    return Needs(code=[read_user_file(written(workspace.root / "tools.py", text))])


def test_packages_that_tools_import_are_named_with_their_versions(workspace):
    needs = code(
        workspace,
        "import json\nimport yaml\nimport prices\nfrom stillroom.tools import tool\n"
        "import not_installed_anywhere\n",
        prices="from msgspec import Struct\n",
    )
    spec = pack(workspace, box(workspace), needs).spec
    assert spec.packages == [
        f"msgspec=={version('msgspec')}",
        f"PyYAML=={version('pyyaml')}",
    ]


def test_files_that_tools_name_go_with_them_but_no_keys(workspace):
    names = ("kb/a.json", "kb/deep/b.json", "kb/.hidden", "prices.csv", "q.txt", ".env", "id_rsa")
    for name in (*names, "kb/.git/objects/ab/cdef"):
        written(workspace.root / name)
    needs = code(
        workspace,
        "KB = Path(__file__).parent / 'kb'\nPRICES = 'prices.csv'\nENV = '.env'\nKEY = 'id_rsa'\n"
        "RUNS = 'runs'\nHERE = '.'\nROOT = '/'\nQUESTIONS = f'{HERE}/q.txt'\n",
    )
    (workspace.root / "runs" / "sft-1").mkdir(parents=True)
    packed = pack(workspace, box(workspace), needs, budget_usd=1)
    assert sorted(file.remote_path for file in packed.spec.files) == [
        "workspace/kb/a.json",
        "workspace/kb/deep/b.json",
        "workspace/prices.csv",
        "workspace/q.txt",
    ]
    assert packed.notes == [
        "sent, because the code refers to it: kb/ (2 files)",
        "sent, because the code refers to it: prices.csv",
        "sent, because the code refers to it: q.txt",
    ]


def test_files_that_tools_name_go_with_them_from_a_hidden_workspace(workspace):
    hidden = Workspace(workspace.root / ".hidden")
    written(hidden.root / "kb" / "a.json")
    assert places_of(hidden, code(hidden, "KB = 'kb'\n")) == ["workspace/kb/a.json"]


def test_the_script_of_an_mcp_server_goes_with_it(workspace):
    written(workspace.root / "server.py")
    needs = Needs(servers=["python server.py --port {port}"])
    assert places_of(workspace, needs) == ["workspace/server.py"]


def test_an_order_names_keys_and_holds_none(workspace, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789abcdef")
    monkeypatch.setenv("SEARCH_KEY", "s-0123456789abcdef")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    own_keys = users_machines_file().with_name("keys.yml")
    own_keys.write_text("- {key: SEARCH_KEY, tools: true}\n", encoding="utf-8")
    needs = Needs(
        code=code(workspace, "x = 1").code,
        key_names=["OPENAI_API_KEY", "NOT_SET"],
        models=[locate_model(workspace, "org/model")],
    )
    packed = pack(workspace, box(workspace), needs)
    assert packed.spec.key_names == ["OPENAI_API_KEY", "SEARCH_KEY", "HF_TOKEN"]
    assert packed.spec.variables == ["SEARCH_KEY", "HF_TOKEN"]
    assert b"0123456789abcdef" not in packed.run_files["remote.json"]
    assert packed.secrets["OPENAI_API_KEY"] == "sk-0123456789abcdef"
    assert "0123456789abcdef" not in repr(packed)


def test_the_file_that_says_which_key_may_go_where_is_found_elsewhere(tmp_path, workspace):
    own_keys = users_machines_file().with_name("keys.yml")
    own_keys.write_text("- {key: SEARCH_KEY, tools: true}\n", encoding="utf-8")
    packed, run = packed_run(workspace, code(workspace, "x = 1"))
    with away(lay_out(run, packed.spec, tmp_path / "there")):
        assert keys_file().is_relative_to(tmp_path / "there" / "outside")
        assert tool_variables() == {"SEARCH_KEY"}


@pytest.mark.parametrize("has_code", [False, True])
def test_without_a_keys_file_none_is_looked_for_in_the_machines_own_folders(
    tmp_path, workspace, has_code
):
    # The machine may have a folder of that name, such as /root, that the run may not enter.
    needs = code(workspace, "x = 1") if has_code else Needs()
    packed, run = packed_run(workspace, needs)
    with away(lay_out(run, packed.spec, tmp_path / "there")):
        assert keys_file().is_relative_to(tmp_path / "there" / "outside")
        assert tool_variables() == frozenset()


def test_a_machine_of_the_workspaces_own_file_gets_no_keys(workspace, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789abcdef")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    written(workspace.root / "machines.yml", "box: {ssh: somebody@else.test}")
    with pytest.raises(InputError, match="defined in the workspace"):
        pack(workspace, box(workspace), Needs(key_names=["OPENAI_API_KEY"]))
    packed = pack(workspace, box(workspace), Needs(models=[locate_model(workspace, "org/model")]))
    assert packed.secrets == {}
    assert "HF_TOKEN is not sent" in packed.notes[0]


def test_a_file_of_keys_within_a_model_is_refused(workspace):
    model = model_folder(workspace.root / "model")
    written(model / "credentials.json")
    with pytest.raises(InputError, match="usually contain keys or passwords"):
        pack(workspace, box(workspace), Needs(models=[locate_model(workspace, "model")]))


def test_a_store_that_a_teacher_made_of_the_rows_goes_with_them(workspace):
    rows = written(workspace.root / "train.jsonl")
    for name, source in (("top4-a.bin", rows), ("top4-b.bin", rows.with_name("other.jsonl"))):
        store = written(workspace.root / "soft_targets" / name)
        source.touch()
        write_manifest(store, operation="start_training", inputs=[source], request={}, counts={})
    needs = Needs(files=[rows], outputs=["soft_targets"])
    spec = pack(workspace, box(workspace), needs).spec
    assert spec.outputs == ["soft_targets"]
    assert [file.remote_path for file in spec.files if "soft" in file.remote_path] == [
        "workspace/soft_targets/top4-a.bin",
        "workspace/soft_targets/top4-a.bin.manifest.json",
    ]


def test_a_model_that_config_yml_names_by_a_link_is_found_elsewhere(tmp_path, workspace):
    real = model_folder(tmp_path / "disk" / "base")
    (workspace.root / "models").mkdir()
    (workspace.root / "models" / "base").symlink_to(real)
    packed, run = packed_run(workspace, Needs(models=[locate_model(workspace, "models/base")]))
    base = tmp_path / "there"
    variable = lay_out(run, packed.spec, base)
    with away(variable):
        there = Workspace(base / "workspace")
        for name in ("models/base", str(workspace.root / "models/base"), str(real)):
            location = locate_model(there, name)
            assert location.path == base / f"outside{real}"
            assert identify(there, location, role="student").location == str(real)


def test_what_an_hour_costs_is_that_of_the_machine_that_does_the_run(workspace):
    written(workspace.root / "prices.yml", "machine: {usd_per_hour: 0.1}")
    assert usd_per_hour_of(workspace, workspace.root) == 0.1
    limits = RunLimits(started=0.0, price_per_hour=2.0)
    write_json(workspace.root / LIMITS_FILE, limits)
    with away(home_variable([("/home/me/work", str(workspace.root))])):
        assert usd_per_hour_of(workspace, workspace.root) == 2.0


def test_the_tokenizer_of_a_served_teacher_goes_with_a_training(workspace):
    model = model_folder(workspace.root / "teacher")
    with (model / "model.safetensors").open("wb") as weights:
        weights.truncate(1 << 30)
    assert places_of(workspace, Needs(tokenizers=["teacher", "org/on-the-hub"])) == [
        "workspace/teacher/config.json"
    ]


def test_an_output_behind_a_link_is_written_where_it_leads(tmp_path, workspace):
    (workspace.root / "real").mkdir()
    (workspace.root / "link").symlink_to("real")
    packed, run = packed_run(workspace, Needs(outputs=["link/out.jsonl"]))
    assert packed.spec.outputs == ["real/out.jsonl"]
    with away(lay_out(run, packed.spec, tmp_path / "there")):
        there = Workspace(tmp_path / "there" / "workspace")
        output = there.output_file("link/out.jsonl", label="output")
    assert output == there.root / "real/out.jsonl"


def test_a_workspace_whose_runs_lie_behind_a_link_is_refused(workspace):
    (workspace.root / "elsewhere").mkdir()
    (workspace.root / "runs").symlink_to("elsewhere")
    with pytest.raises(InputError, match="runs are not downloaded through links"):
        pack(workspace, box(workspace), Needs())


def test_a_run_that_a_request_names_is_known_elsewhere(workspace):
    run = create_run(workspace, RunKind.ROLLOUTS, {"output": "out.jsonl"})
    places = places_of(workspace, Needs(records=[run.run_id, "out.jsonl"]))
    assert places == [
        f"workspace/runs/{run.run_id}/{name}" for name in ("run.json", "request.json")
    ]


def test_the_evaluations_of_earlier_exports_go_with_a_checkpoint(tmp_path, workspace):
    checkpoint = model_folder(workspace.runs / "run-1/checkpoints/final")
    record = CheckpointRecord(run_id="run-1", method="sft", step=3, base_model="org/base")
    write_json(checkpoint / RECORD, record)
    for name, step in (("exports/first", 3), ("exports/older", 2)):
        folder = model_folder(workspace.root / name)
        export = ExportManifest(
            format="merged", request={}, run_id="run-1", method="sft", step=step, precision="bf16",
            base_model="org/base", files=[], stillroom_version="1", created_at="",
        )  # fmt: skip
        write_json(folder / MANIFEST, export)
    for run_id, model in (("first", "exports/first"), ("older", "exports/older"), ("own", "run-1")):
        write_evaluation(workspace.runs, run_id, [evaluated(0, is_right=True)], model=model)
    places = places_of(workspace, Needs(exported=locate_model(workspace, "run-1")))
    assert "workspace/runs/own/rollouts.jsonl" in places
    assert "workspace/runs/first/rollouts.jsonl" in places
    assert "workspace/runs/older/rollouts.jsonl" not in places
    assert f"workspace/exports/first/{MANIFEST}" in places
    assert f"workspace/exports/older/{MANIFEST}" not in places

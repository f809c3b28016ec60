"""Files of keys, devices and the system's own files are refused by everything that takes a path."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stillroom import api
from stillroom.data.inspect import InspectExamples, inspect_examples
from stillroom.errors import EngineError, InputError
from stillroom.secrecy.readable import check_readable
from stillroom.settings import Workspace

CANARY = "sk-canary-5f2d81c0"
KEY_FILES = [
    ".env",
    ".env.local",
    "prod.env",
    ".netrc",
    "server.pem",
    "id_ed25519",
    "id_rsa.bak",
    ".ssh/config",
    ".aws/config",
    "credentials",
    "credentials.json",
    "my-service-account.json",
    "client_secret_123.json",
    "secrets.yml",
    "openai_api_key.txt",
    "private.key",
    ".bash_history",
]


@pytest.mark.parametrize("name", KEY_FILES)
def test_a_file_of_keys_is_refused_by_its_name(tmp_path: Path, name: str):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(CANARY)
    with pytest.raises(InputError, match="usually contain keys"):
        check_readable(path)


@pytest.mark.parametrize(
    "name",
    [
        "prompts.jsonl",
        "secrets_of_history.txt",
        "api_keys.jsonl",
        "credentials.py",
        "keyboard.json",
        "tokenizer.json",
        "token_counts.json",
        "environment.yml",
        "id_rsa.pub",
        "monkey.txt",
    ],
)
def test_data_and_code_are_readable_however_they_are_named(tmp_path: Path, name: str):
    (tmp_path / name).write_text("{}")
    check_readable(tmp_path / name)


def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path):
    (tmp_path / ".env").write_text(CANARY)
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / ".env")
    (tmp_path / "system.jsonl").symlink_to("/proc/self/environ")
    (tmp_path / "circle.jsonl").symlink_to(tmp_path / "circle.jsonl")
    for name in ("rows.jsonl", "system.jsonl", "circle.jsonl"):
        with pytest.raises(InputError):
            check_readable(tmp_path / name)


def test_pipes_sockets_and_devices_are_refused_without_being_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.jsonl"))
    for path in (tmp_path / "pipe.jsonl", tmp_path / "socket.jsonl", Path("/dev/zero")):
        with pytest.raises(InputError, match="not a file"):
            check_readable(path)
    for path in ("/proc/self/environ", "/proc/1/../self/environ", "/dev/fd/0", "/sys/power/state"):
        with pytest.raises(InputError):
            check_readable(Path(path))


def configured(path: str) -> dict[str, Any]:
    return {"config": "config.yml", "overrides": [f"data.train_file={path}"]}


DOORS: dict[str, Callable[[str], dict[str, Any]]] = {
    "validate_dataset": lambda path: {"path": path},
    "inspect_examples": lambda path: {"path": path},
    "show_lineage": lambda path: {"path": path},
    "filter_dataset": lambda path: {"input": path, "output": "out.jsonl"},
    "convert_rollouts": lambda path: {"input": path, "output": "out.jsonl"},
    "make_dpo_pairs": lambda path: {"input": path, "output": "out.jsonl"},
    "sample_for_review": lambda path: {"input": path, "output": "out.jsonl"},
    "score_rollouts": lambda path: {"input": path, "output": "out.jsonl"},
    "generate_rollouts": lambda path: {"input": path, "model": "teacher", "provider": "demo"},
    "evaluate_model": lambda path: {"data": path, "model": "teacher", "provider": "demo"},
    "start_training": configured,
    "plan_training": lambda path: {"config": path},
    "compare_evaluations": lambda path: {"baseline": path, "candidates": [path]},
}
MORE_DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "judge": (
        "generate_rollouts",
        {"input": "prompts.jsonl", "model": "teacher", "provider": "demo"},
    ),
    "tools": (
        "generate_rollouts",
        {"input": "prompts.jsonl", "model": "teacher", "provider": "demo"},
    ),
    "rewards": (
        "generate_rollouts",
        {"input": "prompts.jsonl", "model": "teacher", "provider": "demo"},
    ),
    "verdicts": ("filter_dataset", {"input": "rows.jsonl", "output": "out.jsonl"}),
    "decontaminate": ("filter_dataset", {"input": "rows.jsonl", "output": "out.jsonl"}),
}


def project(folder: Path) -> Workspace:
    (folder / ".env").write_text(f"OPENAI_API_KEY={CANARY}\n")
    (folder / "prompts.jsonl").write_bytes(b'{"prompt": "Hello?"}\n')
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "rows.jsonl").write_bytes(msgspec.json.encode(row) + b"\n")
    config = "dataset_type: sft\nmodel: {path: demo/student}\ndata: {train_file: rows.jsonl}\n"
    (folder / "config.yml").write_text(config)
    os.mkfifo(folder / "pipe.jsonl")
    return Workspace(folder)


def refusal(workspace: Workspace, name: str, arguments: dict[str, Any]) -> str:
    operation = api.operation_named(name)
    with pytest.raises(EngineError) as caught:
        operation.call(workspace, operation.request.model_validate(arguments))
    return str(caught.value)


@pytest.mark.parametrize("path", [".env", "/proc/self/environ", "pipe.jsonl", "/dev/zero"])
@pytest.mark.parametrize("name", DOORS)
def test_every_operation_refuses_such_a_path(tmp_path: Path, name: str, path: str):
    text = refusal(project(tmp_path), name, DOORS[name](path))
    assert CANARY not in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("path", [".env", "/proc/self/environ", "pipe.jsonl"])
@pytest.mark.parametrize("option", MORE_DOORS)
def test_every_option_that_takes_a_path_refuses_such_a_path(tmp_path: Path, option: str, path: str):
    name, arguments = MORE_DOORS[option]
    value = (path,) if option == "decontaminate" else path
    text = refusal(project(tmp_path), name, {**arguments, option: value})
    assert CANARY not in text
    assert not (tmp_path / "runs").exists()


def test_the_text_of_an_unrecognised_file_is_not_quoted(tmp_path: Path):
    (tmp_path / "settings.json").write_text(f'{{"password": "{CANARY}"}}')
    (tmp_path / "notes.jsonl").write_text(f"export PASSWORD={CANARY}\n")
    for name in ("settings.json", "notes.jsonl"):
        page = inspect_examples(Workspace(tmp_path), InspectExamples(path=name)).page
        assert CANARY not in repr(page)
        assert "not shown" in page.examples[0].text
        assert CANARY not in refusal(Workspace(tmp_path), "validate_dataset", {"path": name})


def test_a_broken_row_among_good_ones_is_still_shown(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": broken\n{"prompt": "Hello?"}\n')
    page = inspect_examples(Workspace(tmp_path), InspectExamples(path="rows.jsonl")).page
    assert page.examples[0].text == '{"prompt": broken'


@pytest.mark.parametrize(
    "text",
    [
        f"OPENAI_API_KEY={CANARY}\n",
        f"model: m\nrubric: r\napi_key: {CANARY}\n",
        f"model: m\nrubric: r\nsees: {{password: {CANARY}}}\n",
        f"- {CANARY}\n",
        f"password: {CANARY}: x: y\n",
        f"password: *{CANARY}\n",
        f"password: !!int {CANARY}\n",
        f"? [{CANARY}\n",
    ],
)
@pytest.mark.parametrize("option", ["judge", "config", "prices"])
def test_a_document_that_is_no_config_is_not_quoted(tmp_path: Path, option: str, text: str):
    workspace = project(tmp_path)
    generate = {"input": "prompts.jsonl", "model": "m", "provider": "openai"}
    generate |= {"base_url": "http://127.0.0.1:9/v1", "budget_usd": 1}
    if option == "prices":
        (tmp_path / "prices.yml").write_text(text)
        assert CANARY not in refusal(workspace, "generate_rollouts", generate)
        return
    (tmp_path / "settings.yml").write_text(text)
    if option == "judge":
        arguments = {**generate, "provider": "demo", "model": "teacher", "judge": "settings.yml"}
        arguments |= {"base_url": None, "budget_usd": None}
        assert CANARY not in refusal(workspace, "generate_rollouts", arguments)
    else:
        assert CANARY not in refusal(workspace, "plan_training", {"config": "settings.yml"})

"""`stillroom chat`: messages of a person or an agent, the model's turns and its tools' replies."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.conversations import answer, user
from fakes.http_endpoint import ScriptedEndpoint
from fakes.projects import endpoint_project
from fakes.training import make_project
from stillroom.rollout.chat import ChatWithModel
from stillroom_mcp.chat import with_training_system
from stillroom_mcp.cli import main


def chat(root: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["chat", *words, "--workspace", str(root)])
    return int(caught.value.code or 0)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return endpoint_project(tmp_path, num_prompts=2)


def test_an_agent_says_something_and_reads_turns_and_tool_replies(project, capsys) -> None:
    with ScriptedEndpoint() as endpoint:
        words = ("m", "--base-url", endpoint.base_url, "--message", "one", "--message", "two")
        assert chat(project, *words) == 0
        told = capsys.readouterr()
        assert chat(project, *words[:4], "one", "--json") == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # The tools.py beside it is used without being named.
    assert told.out.splitlines()[:3] == [
        '  -> echo({"text": "turn 0"})',
        "  <- turn 0",
        "The answer is 42.",
    ]
    assert "tools: tools.py" in told.err
    # The second message is answered with the first in view: two turns are there already.
    assert told.out.count("The answer is 42.") == 2
    assert told.out.count("<- turn") == 1
    assert [line["role"] for line in lines] == ["assistant", "tool", "assistant"]


def test_a_person_types_begins_anew_and_ends(project, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/new\nagain\n/quit\nnever said\n"))
    with ScriptedEndpoint() as endpoint:
        assert chat(project, "m", "--base-url", endpoint.base_url, "--tools", "tools.py") == 0
        assert {prompt for prompt, _ in endpoint.served} == {"hello", "again"}
    # Without what was said before, the model calls its tool again.
    assert capsys.readouterr().out.count("<- turn 0") == 2


def test_a_row_is_answered_first_with_its_messages(project, capsys) -> None:
    with ScriptedEndpoint(tool_turns=0) as endpoint:
        where = ("--data", "prompts.jsonl", "--row", "1")
        assert (
            chat(project, "m", "--base-url", endpoint.base_url, *where, "--message", "Sure?") == 0
        )
        assert {prompt for prompt, _ in endpoint.served} == {"question 1"}
    assert capsys.readouterr().out.splitlines() == [
        "user: question 1", "The answer is 42.", "The answer is 42.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (("nowhere", "--message", "hi"), "there is no model 'nowhere'", "fix: "),
        (("m", "--base-url", "URL", "--data", "prompts.jsonl", "--row", "7"), "row 7 is out",
         "from 0 to 1"),
        (("m", "--temperature", "9"), "temperature: input should be less", "fix: "),
        (("m", "--tols", "x"), "did you mean '--tools'?", "fix: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_next_step(project, capsys, words, problem, fix) -> None:
    with ScriptedEndpoint() as endpoint:
        code = chat(project, *(endpoint.base_url if one == "URL" else one for one in words))
    told = capsys.readouterr().err
    assert code in (1, 2)
    assert problem in told
    assert fix in told


def test_a_student_reads_the_system_message_that_it_was_trained_with(tmp_path, tiny_models) -> None:
    project = make_project(tmp_path, "sft", tiny_models.folder("llama"), trainer={"num_epochs": 1})
    system = {"role": "system", "content": "You sell lamps."}
    project.write([{"messages": [system, user("Hi"), answer("Hello.")]}] * 4)
    project.train()

    def system_of(**fields) -> str | None:
        request = ChatWithModel(**{"model": "run-1", **fields})
        return with_training_system(project.workspace, request).system

    assert system_of() == "You sell lamps."
    assert system_of(system="") == ""
    assert system_of(model="no-such-run") is None
    assert system_of(base_url="http://127.0.0.1:1/v1") is None


def test_a_model_in_the_chats_own_process_gets_threads_that_do_not_spin(
    tmp_path, tiny_models
) -> None:
    program = (
        "import os, sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('OMP_WAIT_POLICY'))\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "os.environ.pop('OMP_WAIT_POLICY', None)\n"
        "from stillroom_mcp.cli import main\n"
        f"main(['chat', {str(tiny_models.folder('llama'))!r}, '--message', 'hi'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert ended.stdout == "PASSIVE\n", ended.stderr

"""What the student acts with in on-policy distillation, as config.yml's `rollout` says."""

import pytest

from fakes.mcp_servers import odd_server
from fakes.training import Project, make_project, make_student
from fakes.waiting import run_async
from fakes.websites import Response, open_website
from stillroom.data.formats import load_tasks
from stillroom.errors import ConfigError, InputError
from stillroom.train.config.request import PlanTraining, StartTraining, plan_request
from stillroom.train.loop.student_environment import open_student_environment
from stillroom.train.planning.plan import plan_training
from stillroom.types import SamplingSettings

PRICE = """
from stillroom.tools import tool

@tool
def price(item: str) -> str:
    "The price of an item."
    return "12 " * 1000
"""


@pytest.fixture
def project(tmp_path, tiny_models) -> Project:
    clerk = tiny_models.folder("llama", "clerk")
    project = make_project(
        tmp_path,
        "distill",
        clerk,
        teacher={"path": str(clerk)},
        rollout={"max_turns": 4, "max_tokens": 8},
    )
    project.write([{"prompt": f"Item {i}?", "tools": ["price"]} for i in range(6)])
    return project


def assert_tools_answer(project: Project) -> None:
    for metrics in project.reporter.measured:
        assert metrics["turns"] > 1
        assert metrics["tool_errors"] == 0
        assert metrics["logprob_gap"] < 1e-5


def test_mcp_servers_stand_beside_tools_py(project):
    (project.root / "tools.py").write_text(
        PRICE.replace("price", "weigh").replace("price", "weight"), encoding="utf-8"
    )
    project.config["rollout"]["mcp_url"] = [" ".join(odd_server())]

    project.train()

    assert_tools_answer(project)


def test_two_tools_of_one_name_are_refused(project):
    (project.root / "tools.py").write_text(PRICE, encoding="utf-8")
    project.config["rollout"]["mcp_url"] = [" ".join(odd_server())]

    with pytest.raises(InputError, match="'price' is used by both"):
        project.train()


def test_long_replies_are_cut_to_so_many_tokens(project):
    (project.root / "tools.py").write_text(PRICE, encoding="utf-8")
    project.config["rollout"]["max_tool_response"] = 6

    project.train()

    # Uncut, each of them would fill the context and end its rollout.
    for metrics in project.reporter.measured:
        assert metrics["turns"] > 1
        assert metrics["truncated"] == 0


def asked_text(project, tiny_models, family) -> str:
    """What the student is given to answer, as text."""
    start = tiny_models.folder("llama", family)
    project.config |= {"model": {"path": str(start), "qlora_rank": 0}}
    project.write([{"prompt": "Item?"}])
    project.write_config()
    plan = plan_request(project.workspace, StartTraining())
    tasks = load_tasks(plan.train_file)
    student = make_student(tiny_models, start)

    async def ask() -> str:
        stage = open_student_environment(
            project.workspace, plan, student, tasks, is_judge_optional=True
        )
        sampling = SamplingSettings(temperature=1.0, max_tokens=1, seed=0)
        async with (
            stage as opened,
            opened.policy(sampling, num_rollouts=1) as policy,
            policy.converse(tasks[0].messages, [], seed_key="k") as conversation,
        ):
            return student.loaded.tokenizer.decode(conversation.trace().ids)

    return run_async(ask)


def test_a_reasoning_mode_reaches_the_chat_template(project, tiny_models):
    plain = asked_text(project, tiny_models, "qwen3")
    project.config["rollout"]["reasoning_mode"] = "none"

    assert asked_text(project, tiny_models, "qwen3") == plain + "<think>\n\n</think>\n\n"


def test_a_reasoning_mode_that_the_template_does_not_know_ends_the_run_before_it_begins(project):
    project.config["rollout"]["reasoning_mode"] = "none"
    project.write_config()

    with pytest.raises(ConfigError, match="reasoning_mode: none"):
        plan_training(project.workspace, PlanTraining())
    with pytest.raises(ConfigError, match="reasoning_mode: none"):
        project.train()
    assert project.reporter.measured == []


@pytest.mark.browser
def test_the_student_may_have_a_browser(project, tiny_models):
    project.config["rollout"]["browse"] = True
    project.write([{"prompt": "What is there?", "tools": ["browse_open"]}])

    async def open_a_page() -> str:
        async with open_website(lambda _: Response("<p>Kettles")) as site:
            project.config["rollout"]["browse_allow"] = [f"127.0.0.1:{site.port}"]
            project.write_config()
            plan = plan_request(project.workspace, StartTraining())
            tasks = load_tasks(plan.train_file)
            student = make_student(tiny_models, tiny_models.folder("llama", "clerk"))
            stage = open_student_environment(
                project.workspace, plan, student, tasks, is_judge_optional=True
            )
            async with stage as opened:
                assert opened.tools is not None
                async with opened.tools.session(tasks[0]) as session:
                    result = await session.call(
                        "browse_open", {"url": f"http://127.0.0.1:{site.port}/"}
                    )
        return result.content

    assert "Kettles" in run_async(open_a_page)

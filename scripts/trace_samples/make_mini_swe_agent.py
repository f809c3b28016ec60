"""Has mini-swe-agent work with a scripted endpoint, and keeps its trajectory.

`PYTHONPATH=scripts python -m trace_samples.make_mini_swe_agent`; needs mini-swe-agent.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

os.environ |= {"OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from trace_samples.conversation import MODEL
from trace_samples.scripted_endpoint import (
    Call,
    Json,
    Reply,
    ScriptedEndpoint,
)
from trace_samples.seen import SAMPLES, chat_call, write_seen

_FOLDER = SAMPLES / "swe_agent"
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat prices.txt"


def _script(_path: str, body: Json) -> Reply:
    if any(message["role"] == "tool" for message in body["messages"]):
        call = Call("call_2", "bash", {"command": _SUBMIT})
        return Reply(text="That is it.", calls=(call,), prompt_tokens=300, completion_tokens=9)
    call = Call("call_1", "bash", {"command": "cat prices.txt"})
    return Reply(text="I look.", reasoning="A file.", calls=(call,), prompt_tokens=200)


def main() -> None:
    """Writes the trajectory and what the endpoint saw."""
    (_FOLDER / "mini.traj.json").unlink(missing_ok=True)
    _FOLDER.mkdir(parents=True, exist_ok=True)
    templates = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch, ScriptedEndpoint(_script) as endpoint:
        folder = Path(scratch)
        (folder / "prices.txt").write_text("lamp 12\nchair 30\n", encoding="utf-8")
        model = LitellmModel(
            model_name=f"openai/{MODEL}",
            model_kwargs={"api_base": f"{endpoint.url}/v1"},
            cost_tracking="ignore_errors",
            observation_template=templates["model"]["observation_template"],
        )
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=scratch),
            system_template="You mend shops.",
            instance_template="{{task}}",
            output_path=folder / "out.traj.json",
        )
        agent.run("What do a lamp and a chair cost?")
        saved = json.loads((folder / "out.traj.json").read_text(encoding="utf-8"))
        saved["info"]["config"] = {"model": {"model_name": f"openai/{MODEL}"}}
        for message in saved["messages"]:
            message.get("extra", {}).pop("response", None)
        text = json.dumps(saved, indent=1).replace(scratch, "/project")
        (_FOLDER / "mini.traj.json").write_text(text + "\n", encoding="utf-8")
    write_seen(_FOLDER / "mini.seen.json", [chat_call(seen) for seen in endpoint.seen])
    shutil.rmtree(_FOLDER / "__pycache__", ignore_errors=True)


if __name__ == "__main__":
    main()

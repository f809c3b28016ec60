"""A scoring run in a job of Hugging Face whose hub is a folder, with all that a real job does: is all of it here in the end?

    .venv/bin/python benchmarks/remote/job.py

The command that the service would be given is carried out as it is, in an empty environment with `uv`: it fetches the code from the bucket, installs
what is installed here, does the run and brings it back. Only the hub itself is missing. Needs uv and a package index. Prints a JSON line.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
HUB_VARIABLE = "STILLROOM_FOLDER_HUB"
SECRET = "sk-a-teachers-key-0123456789"  # noqa: S105
PATCH = """
import os, sys
if os.environ.get("STILLROOM_FOLDER_HUB"):
    sys.path.append({here!r})
    import huggingface_hub, job
    huggingface_hub.HfApi = job.FolderHub
"""


class FolderHub:
    """Of `HfApi` what a run needs; buckets are folders, and a job is a process."""

    def __init__(self, token: str | None = None) -> None:
        self._root = Path(os.environ[HUB_VARIABLE])

    def whoami(self) -> dict[str, Any]:
        return {"name": "me"}

    def create_bucket(self, bucket: str, *, private: bool, exist_ok: bool) -> None:
        (self._root / bucket).mkdir(parents=True, exist_ok=True)

    def bucket_info(self, bucket: str) -> SimpleNamespace:
        return SimpleNamespace(private=True)

    def get_bucket_paths_info(self, bucket: str, paths: list[str]) -> list[SimpleNamespace]:
        files = {path: self._root / bucket / path for path in paths}
        return [SimpleNamespace(path=p, size=f.stat().st_size) for p, f in files.items() if f.is_file()]  # fmt: skip

    def list_bucket_tree(self, bucket: str, prefix: str, *, recursive: bool) -> list[Any]:
        files = [path for path in (self._root / bucket / prefix).rglob("*") if path.is_file()]
        names = [path.relative_to(self._root / bucket).as_posix() for path in files]
        return [SimpleNamespace(path=name, type="file") for name in names]

    def batch_bucket_files(self, bucket: str, *, add: Any = (), delete: Any = ()) -> None:
        for source, path in add:
            target = self._root / bucket / path
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.partial")
            data = source if isinstance(source, bytes) else Path(source).read_bytes()
            temporary.write_bytes(data)
            temporary.rename(target)
        for path in delete:
            (self._root / bucket / path).unlink()

    def download_bucket_files(
        self, bucket: str, files: Any, *, raise_on_missing_files: bool = False
    ) -> None:
        for path, target in files:
            shutil.copyfile(self._root / bucket / path, target)

    def list_jobs_hardware(self) -> list[Any]:
        return []

    def list_jobs(self, *, labels: dict[str, str], namespace: str) -> list[Any]:
        return [SimpleNamespace(id="job")] if (self._root / "log.txt").exists() else []

    def run_job(self, **asked: Any) -> SimpleNamespace:
        home, log = self._root / "home", self._root / "log.txt"
        home.mkdir()
        (home / "sitecustomize.py").write_text(PATCH.format(here=str(Path(__file__).parent)))
        known = ("PATH", "SSL_CERT_FILE")
        own = {k: v for k, v in os.environ.items() if k in known or k.startswith(("UV_", "PIP_"))}
        own |= {"HOME": str(home), "PYTHONPATH": str(home), HUB_VARIABLE: str(self._root)}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                asked["command"],
                env={**own, **asked["env"], **asked["secrets"]},
                cwd=home,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        FolderHub.process = process
        return SimpleNamespace(id="job")

    def inspect_job(self, *, job_id: str, namespace: str) -> SimpleNamespace:
        code = FolderHub.process.poll()
        stage = "RUNNING" if code is None else "ERROR" if code else "COMPLETED"
        return SimpleNamespace(status=SimpleNamespace(stage=stage, message=None))

    def fetch_job_logs(self, **_: Any) -> list[str]:
        return (self._root / "log.txt").read_text(errors="replace").splitlines()[-15:]

    def cancel_job(self, *, job_id: str, namespace: str) -> None:
        FolderHub.process.kill()

    process: Any = None


def main() -> int:
    sys.path.insert(0, str(ROOT / "tests"))
    from fakes.rollout_rows import read_rows
    from fakes.runs_elsewhere import Elsewhere
    from stillroom.remote.follower.follower import Follower
    from stillroom.remote.machine import HfJobsFlavor, Machine
    from stillroom.remote.providers.hf_jobs import HfJobsHost
    from stillroom.remote.providers.provision_log import ProvisionLog

    with tempfile.TemporaryDirectory(prefix="job-") as name:
        root = Path(name)
        os.environ[HUB_VARIABLE] = str(root / "hub")
        (root / "hub").mkdir()
        (root / "work").mkdir()
        elsewhere = Elsewhere(root / "work")
        elsewhere.open()
        machine = Machine(
            name="hf",
            hf_jobs=HfJobsFlavor(flavor="cpu-basic"),
            price_per_hour=1.0,
            folder=str(root / "hub" / "home" / "ours"),
        )
        run, spec = elsewhere.spec(machine)
        log = ProvisionLog(root / "state")
        api = FolderHub()
        host = HfJobsHost(machine, run.path, api=api, token="hf_own", provision_log=log)  # noqa: S106
        began = time.monotonic()
        Follower(run, spec, host, {"KEY": SECRET}).run()
        FolderHub.process.wait(60)
        state = run.read()
        rows = elsewhere.home / "scored.jsonl"
        rewards = [row["reward"] for row in read_rows(rows)] if rows.exists() else None
        files = [path for path in root.rglob("*") if path.is_file()]
        result = {
            "claim": "a whole job, installation included",
            "status": state.status,
            "error": None if state.error is None else state.error.problem,
            "rewards": rewards,
            "seconds": round(time.monotonic() - began, 1),
            "left_provisioned": len(log.entries()),
            "job_exit_code": FolderHub.process.returncode,
            "files_with_the_key": sum(SECRET.encode() in path.read_bytes() for path in files),
        }
    sys.stdout.write(json.dumps(result) + "\n")
    is_right = result["status"] == "succeeded" and not result["files_with_the_key"]
    return 0 if is_right and not result["left_provisioned"] else 1


if __name__ == "__main__":
    sys.exit(main())

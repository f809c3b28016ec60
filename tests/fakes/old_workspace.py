"""The workspace that the code of commit c2f333a left, unpacked where a test wants it.

tests/fixtures/make_old_workspace.py.txt says what is in it and how it was made.
"""

import tarfile
from pathlib import Path

from stillroom.settings import Workspace

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "old_workspace.tar.gz"
OLD_BASE = "/tmp/stillroom-old"


def unpack_old_workspace(folder: Path) -> Workspace:
    """Returns the workspace, moved into `folder`, with the folder `there` of its other machine.

    Requests, manifests and the records of the run on the other machine name absolute paths.
    """
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    named = (
        "home/runs/*/request.json",
        "home/**/*.manifest.json",
        "home/.stillroom/**/*.json",
        "home/runs/*/remote*.json",
        "there/runs/*/*.json",
        "there/runs/*/workspace/runs/*/*.json",
    )
    for path in (path for pattern in named for path in folder.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(OLD_BASE, str(folder)), encoding="utf-8")
    return Workspace(folder / "home")


def run_named(workspace: Workspace, beginning: str) -> str:
    """Returns the id of the only run whose id begins so."""
    (folder,) = workspace.runs.glob(f"{beginning}*")
    return folder.name


def move_endpoint(workspace: Workspace, output: str, base_url: str) -> None:
    """Makes the settings of a half-done output name the endpoint at `base_url`.

    The old one's port is gone, and rollouts resume only with the settings they were started with.
    """
    path = workspace.root / output
    settings = path.with_name(f".{path.name}") / "settings.json"
    lines = settings.read_text(encoding="utf-8").splitlines()
    changed = [f'  "base_url": "{base_url}",' if '"base_url"' in line else line for line in lines]
    settings.write_text("\n".join(changed) + "\n", encoding="utf-8")

"""The workspace that the code of commit 8390ceb left, unpacked where a test wants it.

tests/fixtures/make_old_workspace.py.txt says what is in it and how it was made.
"""

import tarfile
from pathlib import Path

from stillroom.settings import Workspace

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "old_workspace.tar.gz"
OLD_ROOT = "/tmp/stillroom-old-workspace"


def unpack_old_workspace(folder: Path) -> Workspace:
    """Returns the workspace, moved into `folder`.

    The workspace, the files that a waiting run watches, and the model that a checkpoint began from
    are named by absolute paths. All else is found by relative paths and by hashes, so it stays.
    """
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    root = folder / "workspace"
    for pattern in ("*/request.json", "*/checkpoints/*/stillroom.manifest.json"):
        for path in (root / "runs").glob(pattern):
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(OLD_ROOT, str(root)), encoding="utf-8")
    return Workspace(root)


def run_named(workspace: Workspace, beginning: str) -> str:
    """Returns the id of the only run whose id begins so."""
    (folder,) = workspace.runs.glob(f"{beginning}*")
    return folder.name


def move_endpoint(workspace: Workspace, output: str, base_url: str) -> None:
    """Makes the settings of a half-done output name the endpoint at `base_url`.

    The old one's port is gone, and rollouts go on only with the settings they were begun with.
    """
    path = workspace.root / output
    settings = path.with_name(f".{path.name}") / "settings.json"
    lines = settings.read_text(encoding="utf-8").splitlines()
    changed = [f'  "base_url": "{base_url}",' if '"base_url"' in line else line for line in lines]
    settings.write_text("\n".join(changed) + "\n", encoding="utf-8")

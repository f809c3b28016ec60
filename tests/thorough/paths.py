"""Does anything get written outside the workspace? paths.py [--swaps 200]

Every operation that writes is given outputs that lead outside: `..`, absolute, through links, NUL, Unicode that looks like dots and slashes. Then the
paths that are derived (runs, .stillroom, journals, files beside an output) are links that lead outside, and last a folder is swapped for
such a link again and again while rows are written to it. Counted is what there is outside before and after.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scenes import report

from stillroom import api
from stillroom.errors import EngineError
from stillroom.outputs import OutputLock
from stillroom.rollout.journal.journal import RolloutStore
from stillroom.run_folder import create_run
from stillroom.settings import Workspace
from stillroom.train.loop.checkpoints import adopt_checkpoint
from stillroom.types import RunKind
from stillroom.versions import tag_file

ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "reward": 1.0, "success": True, "task_id": "t"}  # fmt: skip
OTHER = {**ROW, "messages": [ROW["messages"][0], {"role": "assistant", "content": "c"}], "reward": 0.0}  # fmt: skip


def operations(space: Workspace) -> dict[str, Callable[[str], object]]:
    """Returns calls that write to the path that they are given."""
    rows = "rows.jsonl"
    return {
        "filter_dataset": lambda p: api.filter_dataset(space, api.FilterDataset(input=rows, output=p, overwrite=True)),
        "convert_rollouts": lambda p: api.convert_rollouts(space, api.ConvertRollouts(input=rows, output=p, overwrite=True)),
        "make_dpo_pairs": lambda p: api.make_dpo_pairs(space, api.MakeDpoPairs(input=rows, output=p, overwrite=True)),
        "sample_for_review": lambda p: api.sample_for_review(space, api.SampleForReview(input=rows, output=p, overwrite=True)),
        "validate_dataset": lambda p: api.validate_dataset(space, api.ValidateDataset(path=rows, report=p + ".html", overwrite=True)),
        "inspect_examples": lambda p: api.inspect_examples(space, api.InspectExamples(path=rows, html=p + ".html", overwrite=True)),
        "report": lambda p: api.write_report(space, api.WriteReport(output=p, overwrite=True)),
        "create_project": lambda p: api.create_project(space, api.CreateProject(path=p, template="starter")),
    }  # fmt: skip


def given(outside: Path) -> list[str]:
    """Returns names of files that lead outside the workspace, or look as if they did."""
    dots = ["..", "../..", "data/../..", "./.././..", "data/./../../x/.."]
    outer = [f"{dot}/{outside.name}/x" for dot in dots]
    links = ["link/x", "link/../x", "link/deep/x", "chain/x", "dangling", "dangling/x", "file-link"]
    odd = ["a\0b", "..\0/x", "\ud800", "x" * 300, "a/" * 3000, "~root/x", "~nobody-here/x", ""]
    # ruff: noqa: RUF001
    looks = ["．．／outside／x", "‥/x", "..∕x", "..%2f..%2fx", "..\\..\\x", "\u202e../x", "x\r\ny", "..;/x", "﹒﹒/x"]  # fmt: skip
    return [*outer, *links, *odd, *looks, str(outside / "x"), f"//{outside}/x", f"/proc/self/cwd/../{outside.name}/x", f"file://{outside}/x"]  # fmt: skip


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def attempt(call: Callable[[], object], tally: dict[str, int]) -> None:
    try:
        call()
        tally["written inside"] += 1
    except (EngineError, ValueError, OSError) as error:
        tally["refused" if isinstance(error, EngineError | ValueError) else "system errors"] += 1


def derived(space: Workspace, outside: Path, tally: dict[str, int]) -> None:
    """Makes each path that is derived from a name a link that leads outside."""
    root = space.root
    output = root / "d.jsonl"
    by_name = operations(space)
    checkpoint = root / "step_000001"
    checkpoint.mkdir()
    (checkpoint / "weights").write_bytes(b"x")
    run = create_run(space, RunKind.SFT, {})
    cases: list[tuple[Path, Callable[[], object]]] = [
        (root / ".stillroom", lambda: tag_file(root, root / "rows.jsonl", "v1", created_at="", manifest=None)),
        (root / ".d.jsonl", lambda: RolloutStore(output, {}).close(is_complete=False)),
        (root / ".d.jsonl.lock", lambda: OutputLock(output).acquire("x")),
        (root / "d.jsonl.dropped", lambda: by_name["filter_dataset"]("d.jsonl")),
        (root / "d.jsonl.manifest.json", lambda: by_name["filter_dataset"]("d.jsonl")),
        (root / ".d.jsonl.new", lambda: by_name["filter_dataset"]("d.jsonl")),
        (root / "d.html", lambda: by_name["sample_for_review"]("d.jsonl")),
        (root / "reports", lambda: api.validate_dataset(space, api.ValidateDataset(path="rows.jsonl"))),
        (run.path / "checkpoints", lambda: adopt_checkpoint(checkpoint, run.path)),
        (run.path / "events.jsonl", lambda: api.cancel_run(space, api.CancelRun(run_id=run.run_id))),
        (run.path / "cancel", lambda: api.cancel_run(space, api.CancelRun(run_id=run.run_id))),
        (root / "runs", lambda: create_run(space, RunKind.SFT, {})),
    ]  # fmt: skip
    for target in (outside, outside / "not there yet", outside / "file"):
        for link, call in cases:
            if link.name == "runs":
                link.rename(root / "runs.kept")
            with suppress(FileNotFoundError):
                link.unlink() if not link.is_dir() or link.is_symlink() else None
            link.symlink_to(target)
            attempt(call, tally)
            if link.is_symlink() or link.is_file():
                link.unlink()
            if link.name == "runs":
                (root / "runs.kept").rename(link)
            output.unlink(missing_ok=True)


def swapped(space: Workspace, outside: Path, swaps: int, tally: dict[str, int]) -> None:
    """Swaps a folder for a link and back as fast as it goes, while operations write to it."""
    folder, aside, link = (space.root / name for name in ("swap", "swap.aside", "swap.link"))
    folder.mkdir()
    link.symlink_to(outside)
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            with suppress(OSError):
                folder.rename(aside)
                link.rename(folder)
                folder.rename(link)
                aside.rename(folder)

    thread = threading.Thread(target=swap)
    thread.start()
    names = ("filter_dataset", "convert_rollouts", "inspect_examples", "report")
    try:
        for number in range(swaps):
            call = operations(space)[names[number % len(names)]]
            attempt(lambda call=call, number=number: call(f"swap/{number % 7}.jsonl"), tally)
    finally:
        is_over.set()
        thread.join(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stillroom-trust-") as name:
        root, outside = Path(name).resolve() / "root", Path(name).resolve() / "outside"
        for folder in (root / "data", outside):
            folder.mkdir(parents=True)
        (outside / "file").write_text("theirs\n")
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (ROW, OTHER)))
        (root / "link").symlink_to(outside)
        (root / "chain").symlink_to(root / "link")
        (root / "dangling").symlink_to(Path(name).resolve() / "not there yet")
        (root / "file-link").symlink_to(outside / "file")
        space, before = Workspace(root), snapshot(outside)
        tally = {"refused": 0, "written inside": 0, "system errors": 0}
        calls, paths = operations(space), given(outside)
        for path in paths:
            for call in calls.values():
                attempt(lambda call=call, path=path: call(path), tally)
        derived(space, outside, tally)
        attempts = sum(tally.values())
        swapped(space, outside, options.swaps, tally)
        above = [p.name for p in Path(name).resolve().iterdir() if p not in (root, outside)]
        changed = len(snapshot(outside).items() ^ before.items()) + len(above)
    return report(
        20,
        f"{len(paths)} paths by {len(calls)} operations and derived paths that are links: {attempts} attempts, {options.swaps} writes while a "
        f"folder was swapped for a link: {changed} files outside were made or changed ({', '.join(f'{n} {k}' for k, n in tally.items())})",
        changed == 0 and tally["refused"] > 0 and tally["written inside"] > 0,
        seed=0,
    )


if __name__ == "__main__":
    sys.exit(main())

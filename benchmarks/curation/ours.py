"""One of our operations in a process of its own: ours.py FOLDER filter|convert|pairs|filter_sft [--no-hash]. Prints one JSON line.

`--no-hash` leaves out the hashes of the manifest and those by which rows are named, to tell what they cost.
"""

import itertools
import json
import resource
import sys
import time
from pathlib import Path

from stillroom import api, files, lineage
from stillroom.curate import pair_candidates
from stillroom.data import row_names
from stillroom.settings import Workspace

# A duplicated conversation parts nowhere; the peers' pairs are of whole conversations.
REQUESTS = {
    "filter": (
        api.filter_dataset,
        api.FilterDataset,
        {"min_reward": 0.7, "success": True, "min_turns": 3, "max_turns": 15},
    ),
    "filter_sft": (
        api.filter_dataset,
        api.FilterDataset,
        {"min_reward": 0.7, "min_turns": 3, "max_turns": 15},
    ),
    "convert": (api.convert_rollouts, api.ConvertRollouts, {}),
    "pairs": (api.make_dpo_pairs, api.MakeDpoPairs, {"cut": "none"}),
}


def main() -> None:
    folder, operation = Path(sys.argv[1]), sys.argv[2]
    output = f"ours_{operation}.jsonl"
    if "--no-hash" in sys.argv:
        # Without hashes it would not be known as our own the next time.
        output = f"ours_{operation}_{time.time_ns()}.jsonl"
        lineage.file_sha256 = lambda *_, **__: ""
        files._BackgroundSha256.update = lambda *_: None
        numbers = itertools.count(1)
        row_names.row_hash = pair_candidates.row_hash = lambda _: f"{next(numbers):016x}"
    call, request, options = REQUESTS[operation]
    source = "rollouts.jsonl" if operation != "filter_sft" else "ours_convert.jsonl"
    filled = request(input=source, output=output, **options)
    started, cpu_before_s = time.perf_counter(), time.process_time()
    result = call(Workspace(folder), filled)
    wall_s = time.perf_counter() - started
    usage = resource.getrusage(resource.RUSAGE_SELF)
    kept = next(
        getattr(result, name) for name in ("kept", "converted", "pairs") if hasattr(result, name)
    )
    print(json.dumps({
        "wall_s": round(wall_s, 3), "cpu_s": round(time.process_time() - cpu_before_s, 2),
        "rss_mb": round(usage.ru_maxrss / 1024), "read": result.read, "kept": kept,
    }))  # fmt: skip


if __name__ == "__main__":
    main()

"""What is left of the byte chain if a server lists only the teacher's k likeliest tokens.

    python benchmarks/any_teacher/served_top_k.py FOLDER --seeds 1 2
    python benchmarks/any_teacher/served_top_k.py FOLDER --summary

`demo/other-student` learns from `demo/teacher`, which has other tokens (see other_tokenizer.py, whose
FOLDER may be given: its SFT and in-process runs are then not done again). Gradients: 48 rollouts of
the student, as it comes and after SFT; the gradient with regard to its logits by k listed tokens
beside that by whole distributions. Training: 80 iterations of 32 rollouts, the teacher behind a
server on the loopback that lists k tokens. One JSON line per measurement; what is in
FOLDER/results.jsonl is not done again.
"""

import argparse
import sys
from pathlib import Path

sys.path += [
    str(Path(__file__).parents[1] / "on_policy"),
    str(Path(__file__).parents[2] / "tests"),
]

import anyio
import msgspec
import torch
from demo_world import ACTING, DemoWorld, Models, Results, policy, reported
from other_tokenizer import SFT_EPOCHS, distilled, sft, stage
from torch.nn.functional import cosine_similarity

from fakes.model_server import FakeModelServer
from fakes.reporters import KeptReporter
from stillroom.api import GenerateRollouts
from stillroom.evaluate.intervals import mean_estimate
from stillroom.models.batches import sampled_sequence
from stillroom.models.load import load_model
from stillroom.models.reread.byte_chain import ListedTokens, SortedSums, SummedSymbols
from stillroom.models.reread.pair_check import open_pair
from stillroom.models.reread.tile_divergence import ByteDivergences
from stillroom.models.resolve import locate_model
from stillroom.rollout.run import generate_rollouts
from stillroom.teachers.local_hf import LocalTeacher
from stillroom.types import Trajectory

KS = (1, 4, 8, 16, 64, 256)
STUDENT, TEACHER = "demo/other-student", "demo/teacher"
GRADIENT, TRAINED = "gradient", "served"


def rollouts_of(world: DemoWorld, name: str, model: str, num: int) -> list[Trajectory]:
    """Returns rollouts of a model at temperature 1."""
    path = world.workspace.root / f"sampled-{name}.jsonl"
    if not path.exists():
        request = GenerateRollouts(
            input="prompts.jsonl", output=path.name, **policy(model), n=num, temperature=1.0,
            seed=world.seed + 4, **ACTING,
        )  # fmt: skip
        folder = world.workspace.runs / f"sampled-{name}"
        folder.mkdir(parents=True, exist_ok=True)

        async def play() -> None:
            await generate_rollouts(
                world.workspace, request, folder=folder, reporter=KeptReporter()
            )

        anyio.run(play)
    lines = path.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Trajectory) for line in lines]


def gradients(world: DemoWorld, name: str, model: str) -> list[dict]:
    """Returns for each k how the gradient by k listed tokens compares with the exact one."""
    student, teacher = (
        LocalTeacher(load_model(world.workspace, locate_model(world.workspace, one)))
        for one in (model, TEACHER)
    )
    pair = open_pair(student.loaded, teacher.loaded)
    rollouts = [one for one in rollouts_of(world, name, model, 48) if any(one.tokens.sampled)]
    readings = [
        pair.read(one.tokens, one.messages, one.tools, num_turns=one.turns) for one in rollouts
    ]
    batches = [student.collate([sampled_sequence(one.tokens)]) for one in rollouts]
    student_NV = torch.cat([student.logits(batch) for batch in batches]).double().softmax(-1)
    teacher_batches = [teacher.collate([reading.tokens]) for reading in readings]
    logits_KV = torch.cat([teacher.logits(batch) for batch in teacher_batches]).double()
    logprobs_KV = logits_KV.log_softmax(-1)
    own_K = torch.cat([batch.targets_N for batch in teacher_batches])
    counts = [batch.num_trained for batch in batches]
    divergences = ByteDivergences(readings, counts, torch.device("cpu"))

    def gradient(symbols):
        found, _ = divergences.compute_tile(
            slice(0, len(student_NV)), student_NV.log(), student_NV, symbols
        )
        return found.value_N.mean().item(), found.compute_gradient().flatten()

    order_P = torch.from_numpy(pair.teacher_trie.order)
    exact_loss, exact = gradient(
        lambda part, cuts: SummedSymbols(SortedSums(logprobs_KV[part].exp(), order_P, cuts))
    )
    own = list(
        zip(own_K.tolist(), logprobs_KV.gather(1, own_K[:, None])[:, 0].tolist(), strict=True)
    )
    results = []
    for k in KS:
        top = logprobs_KV.topk(k)
        pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        listed = ListedTokens.from_logprobs(pairs, own, pair.teacher_trie, torch.device("cpu"))
        loss, by_k = gradient(lambda part, _, listed=listed: listed[part])
        results.append(
            {
                "kind": GRADIENT, "student": name, "seed": world.seed, "k": k,
                "cosine": cosine_similarity(exact, by_k, 0).item(),
                "length": (by_k.norm() / exact.norm()).item(),
                "loss": loss, "exact_loss": exact_loss,
                "tail": (1 - top.values.exp().sum(1)).mean().item(),
            }
        )  # fmt: skip
    return results


def trained(world: DemoWorld, start: str, k: int) -> dict:
    """Returns what training by k listed tokens gave."""
    loaded = load_model(world.workspace, locate_model(world.workspace, TEACHER))
    with FakeModelServer(loaded, max_model_len=loaded.max_context, max_logprobs=k) as server:
        done = distilled(
            world, f"served-{k}", start, "teacher.tokens=reread", "teacher.provider=sglang",
            "teacher.path=served", f"teacher.tokenizer={TEACHER}",
            f"teacher.base_url={server.base_url}", "algorithm.loss_fn=byte_reverse_kl",
            f"algorithm.top_k={k}",
        )  # fmt: skip
    found = world.evaluate(f"served-{k}", done.model, has_kl=False)
    shown = ("byte_share", "not_compared", "teacher_tokens", "teacher_tail", "teacher_kl")
    return {
        "kind": TRAINED,
        "seed": world.seed,
        "k": k,
        "accuracy": found.result.accuracy.value,
        "cpu_s": done.cpu_s,
        "first": {name: done.first[name] for name in shown},
        "last": {name: done.last[name] for name in shown},
        "solved": {task.task_id: int(task.success) for task in found.tasks},
    }


def summary(results: Results) -> str:
    """Returns the cosines, and each k's accuracy beside that of a teacher in the process."""
    lines = []
    for name in dict.fromkeys(row["student"] for row in results.rows if row["kind"] == GRADIENT):
        rows = [row for row in results.rows if row.get("student") == name]
        cosines = {k: [round(row["cosine"], 3) for row in rows if row["k"] == k] for k in KS}
        lines.append(reported(student=name, cosine_by_k_and_seed=cosines))
    for k in sorted({row["k"] for row in results.rows if row["kind"] == TRAINED}):
        rows = [row for row in results.rows if row["kind"] == TRAINED and row["k"] == k]
        lines.append(
            reported(k=k, accuracy={row["seed"]: round(row["accuracy"], 3) for row in rows})
        )
        for rival in ("byte chain", "SFT"):
            gaps = [
                solved - other["solved"][task]
                for row in rows
                if (other := results.find(kind="in process", arm=rival, seed=row["seed"]))
                for task, solved in row["solved"].items()
            ]
            if gaps:
                gap = mean_estimate(gaps, limits=(-1.0, 1.0))
                lines.append(reported(k=k, over=rival, value=gap.value, low=gap.low, high=gap.high))
    return "\n".join(lines)


def measure(world: DemoWorld, results: Results, ks: list[int]) -> None:
    first = sft(world, "sft-other", STUDENT, SFT_EPOCHS)
    for name, model in (("as it comes", STUDENT), ("after SFT", first.model)):
        if not results.find(kind=GRADIENT, student=name, seed=world.seed):
            results.add_and_print(*gradients(world, name, model))
    for k in ks:
        if not results.find(kind=TRAINED, k=k, seed=world.seed):
            results.add_and_print(trained(world, first.model, k))
    for arm in ("SFT", "byte chain"):
        if not results.find(kind="in process", arm=arm, seed=world.seed):
            found = world.evaluate(arm.replace(" ", "-"), stage(world, arm).model, has_kl=False)
            solved = {task.task_id: int(task.success) for task in found.tasks}
            results.add_and_print(
                {
                    "kind": "in process", "arm": arm, "seed": world.seed,
                    "accuracy": found.result.accuracy.value, "solved": solved,
                }
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ks", type=int, nargs="+", default=[16])
    parser.add_argument("--heldout", type=int, default=300)
    parser.add_argument("--summary", action="store_true")
    given = parser.parse_args()
    results = Results(given.folder / "served")
    if given.summary:
        print(summary(results))
        return
    for seed in given.seeds:
        world = DemoWorld(given.folder, seed, num_heldout=given.heldout, models=Models(STUDENT))
        measure(world, results, given.ks)


if __name__ == "__main__":
    main()

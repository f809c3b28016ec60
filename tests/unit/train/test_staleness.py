"""Long rollouts go on under newer weights, are dropped once too old, and survive a kill."""

import json

import pytest
import torch

from fakes.decoding import full_logprobs
from fakes.killed_runs import assert_resumes_exactly
from fakes.students import PROMPTS, make_session, pairs, sample
from fakes.tool_sources import DictTools
from fakes.training import make_project
from stillroom.train.config.resume import CarriedRollout, read_state

CHATML = {"rollout": {"max_tokens": 60, "max_staleness": 1}}
CLERK = {"rollout": {"max_tokens": 8, "max_turns": 6, "max_staleness": 2, "stragglers": 0.5}}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS), encoding="utf-8")
    return path


def tokens_of(sampled):
    return {
        (mode.iteration, mode.index): (outcome.tokens.ids, outcome.tokens.sampled)
        for outcome, mode in pairs(sampled)
    }


@pytest.mark.parametrize(("family", "sections"), [("chatml", CHATML), ("clerk", CLERK)])
def test_what_goes_on_later_has_the_tokens_it_would_have_had_at_once(
    tmp_path, tiny_models, prompts, family, sections
):
    """With the same weights in both iterations nothing tells the two apart."""
    folder = tiny_models.folder("llama", family)
    tools = DictTools({"price": "12"}) if family == "clerk" else None
    waiting = {**sections, "rollout": {**sections["rollout"], "max_staleness": 0}}
    whole = make_session(tiny_models, folder, tmp_path, **waiting)
    at_once = tokens_of(sample(whole, prompts, tools=tools))
    at_once |= tokens_of(sample(whole, prompts, 1, tools=tools))

    session = make_session(tiny_models, folder, tmp_path, **sections)
    first = sample(session, prompts, tools=tools)
    second = sample(session, prompts, 1, carried=first.carried, tools=tools)

    assert first.carried
    assert any(carried.turns or carried.begun for carried in first.carried)
    assert second.carried == []
    assert len(first.outcomes) + len(second.outcomes) == 12
    assert tokens_of(first) | tokens_of(second) == at_once
    for outcome in second.outcomes:
        exact = full_logprobs(session.student.loaded, outcome.tokens.ids)
        for i, is_sampled in enumerate(outcome.tokens.sampled):
            if is_sampled:
                assert outcome.tokens.logprobs[i] == pytest.approx(exact[i], abs=1e-4)


def test_a_turn_goes_on_in_its_middle_under_the_new_weights(tmp_path, tiny_models, prompts):
    folder = tiny_models.folder("llama", "chatml")
    session = make_session(tiny_models, folder, tmp_path, **CHATML)
    first = sample(session, prompts)
    begun = next(each for each in first.carried if each.begun)
    with torch.no_grad():
        for parameter in session.student.module.parameters():
            parameter.mul_(1.05)

    second = sample(session, prompts, 1, carried=first.carried)

    place = next(
        i
        for i, mode in enumerate(one.rollout for one in second.ended)
        if (mode.iteration, mode.index) == (0, begun.index)
    )
    trace = second.outcomes[place].tokens
    start = trace.sampled.index(True)
    middle = start + len(begun.begun.ids)
    assert trace.ids[start:middle] == begun.begun.ids
    # What was sampled before the update has the probabilities of the weights before it.
    assert trace.logprobs[start:middle] == begun.begun.logprobs
    newer = full_logprobs(session.student.loaded, trace.ids)
    assert trace.logprobs[middle:] == pytest.approx(newer[middle:], abs=1e-4)
    assert trace.logprobs[start:middle] != pytest.approx(newer[start:middle], abs=1e-4)


def test_what_takes_too_many_iterations_is_dropped_and_counted(tmp_path, tiny_models, prompts):
    folder = tiny_models.folder("llama", "chatml")
    session = make_session(
        tiny_models,
        folder,
        tmp_path,
        rollout={"max_tokens": 400, "max_staleness": 1, "stragglers": 0.9},
        trainer={"num_epochs": 2},
    )
    old = [CarriedRollout(iteration=0, index=index, turns=[]) for index in range(6)]

    sampled = sample(session, prompts, 1, carried=old)

    ended = [mode for _, mode in pairs(sampled) if mode.iteration == 0]
    assert len(ended) + sampled.num_dropped == 6
    assert sampled.num_dropped > 0
    assert all(carried.iteration == 1 for carried in sampled.carried)


def test_tools_with_a_state_have_a_straggler_begin_anew(tmp_path, tiny_models, prompts):
    folder = tiny_models.folder("llama", "clerk")
    session = make_session(tiny_models, folder, tmp_path, **CLERK)
    first = sample(session, prompts, tools=DictTools({"price": "12"}, keeps_state=True))
    replied = [each for each in first.carried if any(known.replies for known in each.turns)]
    tools = DictTools({"price": "13"}, keeps_state=True)

    second = sample(session, prompts, 1, carried=first.carried, tools=tools)

    assert replied
    for each in replied:
        place = [(mode.iteration, mode.index) for _, mode in pairs(second)].index((0, each.index))
        said = [m["content"] for m in second.outcomes[place].messages if m["role"] == "tool"]
        assert "12" not in said


def stale_project(root, tiny_models, family="clerk", **rollout):
    project = make_project(
        root,
        "distill",
        tiny_models.folder("llama", family),
        teacher={"path": str(tiny_models.folder("llama", family, seed=1))},
        data={"batch_size": 2, "group_size": 3},
        algorithm={"substeps": 2},
        rollout={"max_turns": 6, "max_staleness": 2, "stragglers": 0.5, **rollout},
        curriculum={"teacher_share": 0.3, "teacher_steps": 3},
        trainer={"num_epochs": 3, "save_step": 1, "learning_rate": 5e-3},
    )
    project.write(PROMPTS)
    return project


@pytest.mark.parametrize(
    ("family", "rollout"),
    [
        # Without tools of another process: how long those take may decide what is in a batch.
        ("clerk", {"max_tokens": 8, "max_turns": 4, "termination_policy": "max_turns"}),
        ("chatml", {"max_tokens": 40}),
    ],
)
def test_a_killed_run_goes_on_with_its_unfinished_rollouts_bit_for_bit(
    tmp_path, tiny_models, family, rollout
):
    project = stale_project(tmp_path, tiny_models, family, **rollout)
    project.config["trainer"]["num_epochs"] = 2

    whole, unbroken = assert_resumes_exactly(project, 4)

    assert whole.steps == 6
    state = read_state(project.checkpoint("step_000003", "killed"))
    assert any(each.turns or each.begun for each in state.carried)
    fresh = [metrics["logprob_gap"] for metrics in unbroken if metrics["staleness"] == 0]
    stale = [metrics["logprob_gap"] for metrics in unbroken if metrics["staleness"] > 0]
    # A token of older weights need not have the probability that the newer ones give it.
    assert max(fresh) < 1e-5
    assert family == "clerk" or max(stale) > 1e-4

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stillroom.curate.filter.request import FilterDataset
from stillroom.importing.request import ImportRollouts
from stillroom.train.config.request import PlanTraining
from stillroom.validation import describe_errors, did_you_mean


class Sampling(BaseModel):
    model_config = ConfigDict(extra="forbid")

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.7
    top_p: float = 1.0


class Evaluation(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    step: int = 1


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str
    provider: Literal["openai", "hf"] = "hf"
    concurrency: Annotated[int, Field(ge=1)] = 1
    sampling: Sampling | None = None
    evals: list[Evaluation] = []

    @model_validator(mode="after")
    def _hf_is_alone(self) -> "Request":
        if self.provider == "hf" and self.concurrency > 8:
            raise ValueError("provider hf takes at most 8 at once")
        return self


def described(**values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Request.model_validate(values)
    return describe_errors(caught.value, Request)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "model is required"),
        ({"model": "m", "modle": 1}, "modle is not known (did you mean 'model'?)"),
        (
            {"model": "m", "zzz": 1},
            "zzz is not known (known: model, provider, concurrency, sampling, evals)",
        ),
        (
            {"model": "m", "sampling": {"temprature": 1}},
            "sampling.temprature is not known (did you mean 'temperature'?)",
        ),
        (
            {"model": "m", "evals": [{"name": "a"}, {"name": "b", "stop": 1}]},
            "evals.1.stop is not known (did you mean 'step'?)",
        ),
        (
            {"model": "m", "concurrency": 0},
            "concurrency: input should be greater than or equal to 1, not 0",
        ),
        ({"model": "m", "concurrency": 9}, "provider hf takes at most 8 at once"),
        (
            {"model": "m", "provider": "hx"},
            "provider: input should be 'openai' or 'hf', not 'hx'",
        ),
        ({"model": 3}, "model: input should be a valid string, not 3"),
    ],
)
def test_a_fault_is_told_with_its_field_and_the_way_out(values: dict, text: str) -> None:
    assert described(**values) == text


def test_all_faults_are_told_at_once() -> None:
    text = described(concurrency=0, modle="m")

    assert text.count(";") == 2
    assert all(name in text for name in ("model is required", "concurrency", "modle"))


def test_a_long_value_is_cut() -> None:
    text = described(model="m", concurrency="9" * 100 + "x")

    assert "…" in text
    assert len(text) < 200
    assert "pydantic" not in text


def test_only_a_near_name_is_suggested() -> None:
    assert did_you_mean("max_turn", ["max_turns", "seed"]) == " (did you mean 'max_turns'?)"
    assert did_you_mean("price", ["price_per_hour", "seed"]) == " (did you mean 'price_per_hour'?)"
    assert did_you_mean("zzz", ["max_turns", "seed"]) == ""


@pytest.mark.parametrize(
    ("request_type", "given", "field"),
    [
        (ImportRollouts, {"input": "a", "output": "b", "reward_from": "thumb"}, "reward_from"),
        (ImportRollouts, {"input": "a", "output": "b", "columns": "user=q"}, "columns"),
        (FilterDataset, {"input": "a", "output": "b", "answered_by": "gpt*"}, "answered_by"),
        (PlanTraining, {"overrides": "trainer.num_epochs=3"}, "overrides"),
    ],
)
def test_a_single_name_is_a_list_of_one(request_type, given, field):
    made = request_type.model_validate(given)

    assert getattr(made, field) == (given[field],)
    assert made == request_type.model_validate(given | {field: [given[field]]})

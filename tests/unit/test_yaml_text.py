"""YAML that somebody else may have written."""

import time

import pytest
import yaml

from stillroom.yaml_text import read_yaml


def bomb(levels: int = 9) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


MERGES = "\n".join(
    ["m0: &m0 {" + ", ".join(f"k{i}: {i}" for i in range(9)) + "}"]
    + [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, 9)]
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (bomb(), "aliases expand to more than"),
        (MERGES, "aliases expand to more than"),
        ("a: &a [*a]", "contains itself"),
        ("a: &a {b: *a}", "contains itself"),
        ("[" * 10_000, "nested too deeply"),
        ("{a: " * 10_000, "nested too deeply"),
        ("a: " + "x" * 300_000, "longer than 262,144 characters"),
        (f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 20)}]", "aliases expand to more than"),
    ],
)
def test_what_stands_for_too_much_is_refused_at_once(text: str, problem: str) -> None:
    # Other programs may keep the processor busy.
    started = time.process_time()
    with pytest.raises(yaml.YAMLError, match=problem):
        read_yaml(text)
    assert time.process_time() - started < 10


def test_aliases_that_stand_for_little_are_read() -> None:
    text = "base: &base {lr: 0.1}\none: *base\ntwo: {<<: *base, steps: 3}\n"
    assert read_yaml(text) == {
        "base": {"lr": 0.1},
        "one": {"lr": 0.1},
        "two": {"lr": 0.1, "steps": 3},
    }
    assert read_yaml("") is None
    assert read_yaml(b"- 1\n- a") == [1, "a"]

"""A machine gets the versions that are installed here, and keeps what it has where that fits."""

import pytest
from packaging.requirements import Requirement

from stillroom.remote.ssh.requirements import (
    PackagesToInstall,
    canonical,
    local_packages,
    own_requirements,
    packages_to_install,
)

HERE = {
    "torch": "2.9.0+cpu",
    "numpy": "2.3.1",
    "nvidia-nccl": "2.27",
    "triton": "3.5",
    "rapid": "1",
}
LINUX = {"python_version": "3.12", "sys_platform": "linux", "platform_machine": "x86_64"}


def to_install(*requirements: str, there: dict[str, str] | None = None, **marks: str):
    return packages_to_install(
        [Requirement(each) for each in requirements],
        local=HERE,
        remote=there or {},
        marks={**LINUX, **marks},
    )


def test_the_version_here_is_installed_without_its_build():
    assert to_install("torch>=2.6").requirements == ["torch==2.9.0"]


def test_what_comes_along_has_the_versions_here_but_for_what_torchs_build_decides():
    assert to_install("rapid").constraints == ["numpy==2.3.1", "torch==2.9.0"]


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("absent>=3", "absent>=3"),
        ("numpy<2", "numpy<2"),  # What is installed here does not fit.
        ("Rapid[fast]", "Rapid[fast]==1"),
        ("mine @ https://example.org/mine.whl", "mine @ https://example.org/mine.whl"),
    ],
)
def test_what_is_not_installed_here_keeps_its_own_condition(requirement, expected):
    assert to_install(requirement).requirements == [expected]


def test_what_an_image_has_stays_and_its_torch_above_all():
    there = {"torch": "2.6.0+cu124", "numpy": "1.26.4"}

    assert to_install("torch>=2.6", "numpy", there=there) == PackagesToInstall([], [])
    added = to_install("torch>=2.6", "rapid", there=there)
    assert added == PackagesToInstall(["rapid==1"], ["torch==2.6.0"])


def test_what_an_image_has_too_old_is_installed_beside_it():
    added = to_install("torch>=2.6", "numpy==2.3.1", there={"torch": "2.6.0", "numpy": "1.26.4"})

    assert added.requirements == ["numpy==2.3.1"]
    assert "numpy==1.26.4" not in added.constraints


@pytest.mark.parametrize(
    ("marks", "expected"),
    [({}, []), ({"python_version": "3.11"}, ["rapid==1"]), ({"sys_platform": "win32"}, [])],
)
def test_conditions_are_those_of_the_machine(marks, expected):
    requirement = 'rapid; python_version < "3.12" and sys_platform != "win32"'

    assert to_install(requirement, **marks).requirements == expected


def test_an_extra_brings_its_packages_and_the_extras_that_it_names():
    def names(*extras: str, packages: tuple[str, ...] = ()) -> set[str]:
        return {each.name for each in own_requirements(local_packages(), extras, packages)}

    assert "msgspec" in names()
    assert "torch" not in names()
    assert {"msgspec", "torch", "peft"} <= names("train")
    assert {"torch", "ray", "playwright"} <= names("all")
    assert "stillroom" not in names("all")
    assert "rapidfuzz" in names(packages=("rapidfuzz==3.9",))


def test_a_condition_of_an_extra_holds_with_the_machines_too():
    requirement = 'rapid; python_version < "3.14" and extra == "traces"'

    assert to_install(requirement).requirements == ["rapid==1"]
    assert to_install(requirement, python_version="3.14").requirements == []


def test_the_first_of_two_installations_counts_and_odd_versions_are_passed_over():
    found = [("Torch", "2.9.0"), ("torch", "1.0"), ("odd", "not a version"), ("My_Tool", "1")]

    assert canonical(found) == {"torch": "2.9.0", "my-tool": "1"}

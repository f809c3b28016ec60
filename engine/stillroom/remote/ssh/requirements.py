"""Determines which packages a machine lacks, at the versions that are installed locally.

All functions are pure except `local_packages`, which reads the installed packages.
"""

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from stillroom.remote.host import MachineError

_DISTRIBUTION = "stillroom"
_SET_BY_TORCH = ("nvidia-", "cuda-", "triton", "pytorch-triton")
"""Packages whose versions are determined by torch's build, and so by the machine's GPU."""


@dataclass(frozen=True, slots=True)
class PackagesToInstall:
    """The arguments of the machine's package installer."""

    requirements: list[str]
    constraints: list[str]
    """The pinned versions of packages that they may depend on."""


def packages_to_install(
    requirements: Iterable[Requirement],
    *,
    local: Mapping[str, str],
    remote: Mapping[str, str],
) -> PackagesToInstall:
    """Returns the packages that a machine lacks, at the versions that are installed locally.

    local, remote: installed versions by name. Remote packages that fit a requirement are kept.
    """
    missing = [r for r in requirements if not _is_satisfied(r, remote)]
    missing_names = {canonicalize_name(requirement.name) for requirement in missing}
    # The machine's own packages keep their versions if possible; its torch fits its GPU's driver.
    pins = {name: version for name, version in local.items() if name not in remote}
    pins |= {name: version for name, version in remote.items() if name == "torch"}
    constraints = [
        f"{name}=={_public_version(version)}"
        for name, version in sorted(pins.items())
        if not name.startswith(_SET_BY_TORCH) and name not in {_DISTRIBUTION, *missing_names}
    ]
    pinned = {_pin(requirement, local) for requirement in missing}
    return PackagesToInstall(sorted(pinned), constraints if pinned else [])


class LocalPackages(msgspec.Struct, frozen=True, kw_only=True):
    """The locally installed packages, which determine what a machine has to install."""

    requires: list[str]
    """Stillroom's requirements, from its metadata."""
    versions: dict[str, str]
    """The installed versions by canonical package name."""


@cache
def local_packages() -> LocalPackages:
    """Returns the locally installed packages, as of the first call.

    Raises MachineError if Stillroom itself is not installed as a package.
    """
    try:
        lines = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise MachineError(
            "stillroom is not installed as a package here, so its requirements are unknown",
            "install it with `pip install stillroom`, or `pip install -e .` in its folder",
        ) from error
    # Each access to `metadata` parses the file again.
    texts = [each.metadata for each in importlib.metadata.distributions()]
    installed = canonical_versions((text["Name"], text["Version"]) for text in texts)
    return LocalPackages(requires=lines, versions=installed)


def run_requirements(
    local: LocalPackages, extras: Sequence[str], packages: Sequence[str], *, python_version: str
) -> list[Requirement]:
    """Returns the requirements of Stillroom, of its extras, and a run's additional packages.

    Requirements whose conditions do not hold for the machine's Python version are left out.
    """
    requirements = [Requirement(line) for line in (*local.requires, *packages)]
    minor = ".".join(python_version.split(".")[:2])
    values = [{"extra": extra, "python_version": minor} for extra in ("", *extras)]
    return [r for r in requirements if r.marker is None or any(map(r.marker.evaluate, values))]


def canonical_versions(versions: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns versions by canonical name; of duplicates, the first, which is what gets imported."""
    by_name: dict[str, str] = {}
    for name, version in versions:
        if name and version and _parse_version(version) is not None:
            by_name.setdefault(canonicalize_name(name), version)
    return by_name


def _is_satisfied(requirement: Requirement, versions: Mapping[str, str]) -> bool:
    version = versions.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _pin(requirement: Requirement, local: Mapping[str, str]) -> str:
    """Returns a requirement pinned to the locally installed version, if that fits it."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    version = local.get(canonicalize_name(requirement.name))
    if requirement.url is not None:
        return f"{requirement.name}{extras} @ {requirement.url}"
    if version is None or not _is_satisfied(requirement, local):
        return f"{requirement.name}{extras}{requirement.specifier}"
    return f"{requirement.name}{extras}=={_public_version(version)}"


def _public_version(version: str) -> str:
    """Returns a version without its local label (`+cpu`), which depends on the machine."""
    return Version(version).public


def _parse_version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None

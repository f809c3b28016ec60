"""Which packages a machine still lacks for our code: the versions that are installed locally.

All functions are pure but `home_packages`, which reads what is installed.
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
_CHOSEN_BY_TORCH = ("nvidia-", "cuda-", "triton", "pytorch-triton")
"""Packages whose versions follow from torch's build, which follows from the machine's GPU."""


@dataclass(frozen=True, slots=True)
class PackagesToInstall:
    """What the machine's installer is given."""

    requirements: list[str]
    constraints: list[str]
    """The versions of whatever comes with them."""


def packages_to_install(
    requirements: Iterable[Requirement],
    *,
    local: Mapping[str, str],
    remote: Mapping[str, str],
    marks: Mapping[str, str],
) -> PackagesToInstall:
    """Returns what a machine lacks, at the versions that are installed locally.

    local, remote: versions by name. What the machine has and fits a requirement is kept.
    marks: what requirements' markers ask of the machine, e.g. `python_version`.
    """
    lacking = [r for r in requirements if _applies(r, marks) and not _fits(r, remote)]
    named = {canonicalize_name(requirement.name) for requirement in lacking}
    # Packages of the image keep their versions if they can; its torch was built for its driver.
    pins = {name: version for name, version in local.items() if name not in remote}
    pins |= {name: version for name, version in remote.items() if name == "torch"}
    constraints = [
        f"{name}=={_public(version)}"
        for name, version in sorted(pins.items())
        if not name.startswith(_CHOSEN_BY_TORCH) and name not in {_DISTRIBUTION, *named}
    ]
    missing = {_pinned(requirement, local) for requirement in lacking}
    return PackagesToInstall(sorted(missing), constraints if missing else [])


class LocalPackages(msgspec.Struct, frozen=True, kw_only=True):
    """What is installed locally, from which follows what a machine has to install."""

    requires: list[str]
    """The requirements of our own package, as its metadata has them."""
    versions: dict[str, str]
    """The installed packages with their versions, by their canonical names."""


@cache
def local_packages() -> LocalPackages:
    """Returns what is installed locally, as it was at the first call.

    Raises MachineError if our own package is not installed.
    """
    try:
        lines = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise MachineError(
            "stillroom is not installed as a local package, so what it needs is not known",
            "install it with `pip install stillroom`, or `pip install -e .` in its folder",
        ) from error
    # Each `metadata` parses a file anew.
    texts = [each.metadata for each in importlib.metadata.distributions()]
    installed = canonical((text["Name"], text["Version"]) for text in texts)
    return LocalPackages(requires=lines, versions=installed)


def own_requirements(
    local: LocalPackages, extras: Sequence[str], packages: Sequence[str]
) -> list[Requirement]:
    """Returns what Stillroom and its extras need, and the packages that a run needs besides."""
    found = [Requirement(line) for line in local.requires]
    wanted, seen = [""], set[str]()
    chosen: list[Requirement] = []
    wanted.extend(extras)
    while wanted:
        extra = wanted.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in found:
            if not _is_of_extra(requirement, extra):
                continue
            if canonicalize_name(requirement.name) == _DISTRIBUTION:
                wanted.extend(requirement.extras)
            else:
                chosen.append(requirement)
    return [*chosen, *map(Requirement, packages)]


def canonical(versions: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns versions by canonical names; the first of a name counts, as for an import."""
    found: dict[str, str] = {}
    for name, version in versions:
        if name and version and _version(version) is not None:
            found.setdefault(canonicalize_name(name), version)
    return found


def _is_of_extra(requirement: Requirement, extra: str) -> bool:
    """Returns whether a requirement belongs to an extra (or, for "", to the package itself)."""
    names_extra = requirement.marker is not None and "extra" in str(requirement.marker)
    if not extra:
        return not names_extra
    return names_extra and f'extra == "{extra}"' in str(requirement.marker)


def _applies(requirement: Requirement, marks: Mapping[str, str]) -> bool:
    """Returns whether a requirement's marker holds on the machine, but for its extra."""
    marker = requirement.marker
    if marker is None:
        return True
    extras = [part.split('"')[1] for part in str(marker).split("extra == ")[1:]] or [""]
    return any(marker.evaluate({**marks, "extra": extra}) for extra in extras)


def _fits(requirement: Requirement, versions: Mapping[str, str]) -> bool:
    found = versions.get(canonicalize_name(requirement.name))
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def _pinned(requirement: Requirement, local: Mapping[str, str]) -> str:
    """Returns a requirement at the version that is installed here, if one that fits it is."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    version = local.get(canonicalize_name(requirement.name))
    if requirement.url is not None:
        return f"{requirement.name}{extras} @ {requirement.url}"
    if version is None or not _fits(requirement, local):
        return f"{requirement.name}{extras}{requirement.specifier}"
    return f"{requirement.name}{extras}=={_public(version)}"


def _public(version: str) -> str:
    """Returns a version without the build (`+cpu`), which depends on the machine."""
    return Version(version).public


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None

"""Runs the few commands of Docker or Podman that rollouts need."""

import hashlib
import shutil
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from stillroom.errors import InputError
from stillroom.secrecy.environments import container_environment

MCP_PORT = 8931
_INFO_TIMEOUT_S = 30.0
_COMMAND_TIMEOUT_S = 120.0
# Long enough to build an image, or to fetch one of several GB.
_IMAGE_TIMEOUT_S = 3600.0
_RUN_LABEL = "stillroom.run"
LOCAL = "local/"


class DockerError(Exception):
    """A command of Docker or Podman failed."""


@dataclass(frozen=True, slots=True)
class Container:
    """A running container, and the URL of its MCP server."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class DockerEngine:
    """Docker or Podman on this machine.

    The run's id labels its containers, so that a later start can find and remove leftovers.
    """

    executable: str
    run_id: str

    async def check(self) -> None:
        """Raises DockerError if the engine does not answer."""
        await self._run(["info"], timeout_s=_INFO_TIMEOUT_S)

    async def prepare_image(self, docker: str, *, folder: Path) -> str:
        """Builds or fetches the image that a row's field `docker` names, and returns its name.

        Raises:
            InputError: there is no such Dockerfile or image, or it cannot be built.
        """
        if not docker.startswith(LOCAL):
            return await self._fetch(docker)
        name = docker.removeprefix(LOCAL)
        file = folder / f"Dockerfile.{name}"
        if not name or "/" in name or not file.is_file():
            raise InputError(
                f"docker: {docker!r} means the file {file}, which does not exist",
                "write that Dockerfile, or name an image",
            )
        # The path is part of the name, since other projects have Dockerfiles of the same name.
        path_hash = hashlib.sha256(str(file.absolute()).encode()).hexdigest()[:12]
        image = f"stillroom-local/{name.lower()}-{path_hash}"
        command = ["build", "--quiet", "--tag", image, "--file", str(file), str(folder)]
        try:
            await self._run(command, timeout_s=_IMAGE_TIMEOUT_S)
        except DockerError as error:
            raise InputError(
                f"{file} could not be built: {error}",
                f"run `{self.executable} build -f {file} {folder}` and mend what it reports",
            ) from error
        return image

    async def _fetch(self, image: str) -> str:
        try:
            await self._run(["image", "inspect", image])
        except DockerError:
            try:
                await self._run(["pull", "--quiet", image], timeout_s=_IMAGE_TIMEOUT_S)
            except DockerError as error:
                raise InputError(
                    f"docker: the image {image!r} is not here and cannot be fetched: {error}",
                    f"check its name, or run `{self.executable} pull {image}` yourself",
                ) from error
        return image

    async def remove_leftovers(self) -> None:
        """Removes the containers that a killed process of this run left behind."""
        listed = await self._run(["ps", "-aq", "--filter", f"label={_RUN_LABEL}={self.run_id}"])
        if names := listed.split():
            await self._run(["rm", "--force", *names])

    @asynccontextmanager
    async def container(self, image: str, env: Mapping[str, str]) -> AsyncGenerator[Container]:
        """Runs a container for the block and removes it at the end, also when cancelled.

        Raises:
            DockerError: the container does not start.
        """
        name = f"stillroom-{uuid.uuid4().hex}"
        variables = [part for key, value in env.items() for part in ("--env", f"{key}={value}")]
        # Published on the loopback only, since just this machine's rollouts use the server.
        ports = ["--publish", f"127.0.0.1::{MCP_PORT}"]
        label = ["--label", f"{_RUN_LABEL}={self.run_id}"]
        try:
            # Without the shield, a cancelled `run` might start the container after its removal.
            with anyio.CancelScope(shield=True):
                await self._run(
                    ["run", "--detach", "--name", name, *label, *ports, *variables, image]
                )
            port = (await self._run(["port", name, f"{MCP_PORT}/tcp"])).split("\n")[0]
            yield Container(name, f"http://localhost:{port.rpartition(':')[2]}/mcp")
        finally:
            with anyio.CancelScope(shield=True):
                await self._remove(name)

    async def _remove(self, name: str) -> None:
        try:
            await self._run(["rm", "--force", "--volumes", name])
        except DockerError:
            # When the run is started again, the container is found by its label and removed.
            return

    async def log_if_stopped(self, container: Container) -> str | None:
        """Returns the end of the container's log if it has stopped, else None."""
        state = ["inspect", "--format", "{{.State.Running}}", container.name]
        if (await self._run(state)).strip() == "true":
            return None
        return (await self._run(["logs", "--tail", "20", container.name])).strip()

    async def _run(self, arguments: Sequence[str], *, timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
        """Returns what a command prints. Raises DockerError if it fails."""
        try:
            with anyio.fail_after(timeout_s):
                done = await anyio.run_process(
                    [self.executable, *arguments], check=False, env=container_environment()
                )
        except (TimeoutError, OSError) as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise DockerError(f"`{Path(self.executable).name} {arguments[0]}`: {reason}") from error
        out, err = (part.decode("utf-8", errors="replace") for part in (done.stdout, done.stderr))
        if done.returncode != 0:
            raise DockerError(
                f"`{Path(self.executable).name} {arguments[0]}` ended with code "
                f"{done.returncode}: {(err or out).strip()[-2000:]}"
            )
        # `logs` prints what the container wrote to standard output and to standard error.
        return out + err if arguments[0] == "logs" else out


class NoEngineError(Exception):
    """Neither Docker nor Podman can be used; the text gives the reason."""


async def find_engine(run_id: str) -> DockerEngine:
    """Returns Docker, else Podman, if one is installed and answers.

    Raises:
        NoEngineError: neither is installed and answers.
    """
    reasons: list[str] = []
    for name in ("docker", "podman"):
        executable = shutil.which(name)
        if executable is None:
            continue
        engine = DockerEngine(executable, run_id)
        try:
            await engine.check()
        except DockerError as error:
            reasons.append(str(error))
        else:
            return engine
    raise NoEngineError("; ".join(reasons) or "neither Docker nor Podman is installed")

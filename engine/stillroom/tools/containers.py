"""The tools of MCP servers in containers: a container for each rollout, over Docker or Podman."""

import hashlib
import shutil
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import anyio
from anyio import AsyncContextManagerMixin

from stillroom.errors import CallFailedError, EngineError, FailureClass, InputError
from stillroom.secrecy.environments import container_environment
from stillroom.tools.guard import Background
from stillroom.tools.mcp.connection import ConnectFailedError
from stillroom.tools.mcp.opener import SessionOpener
from stillroom.tools.mcp.servers import MCPSession, ServerTools, list_server_tools
from stillroom.tools.mcp.spec import ServerSpec
from stillroom.tools.source import ToolResult, ToolSession, ToolSource, ToolTask, error_result
from stillroom.types import ToolSchema

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
        """Builds or pulls the image that a row's field `docker` names, and returns its name.

        Raises:
            InputError: there is no such Dockerfile or image, or it cannot be built.
        """
        if not docker.startswith(LOCAL):
            return await self._pull(docker)
        name = docker.removeprefix(LOCAL)
        file = folder / f"Dockerfile.{name}"
        if not name or "/" in name or not file.is_file():
            raise InputError(
                f"docker: {docker!r} requires the file {file}, which does not exist",
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
                f"run `{self.executable} build -f {file} {folder}` and fix what it reports",
            ) from error
        return image

    async def _pull(self, image: str) -> str:
        """Pulls an image unless it is present. Raises InputError."""
        try:
            await self._run(["image", "inspect", image])
        except DockerError:
            try:
                await self._run(["pull", "--quiet", image], timeout_s=_IMAGE_TIMEOUT_S)
            except DockerError as error:
                raise InputError(
                    f"docker: the image {image!r} is not present locally and cannot be pulled: "
                    f"{error}",
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
        """Returns the tail of the container's log if it has stopped, else None."""
        state = ["inspect", "--format", "{{.State.Running}}", container.name]
        if (await self._run(state)).strip() == "true":
            return None
        return (await self._run(["logs", "--tail", "20", container.name])).strip()

    async def _run(self, arguments: Sequence[str], *, timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
        """Returns what a command prints. Raises DockerError if it fails."""
        try:
            with anyio.fail_after(timeout_s):
                proc = await anyio.run_process(
                    [self.executable, *arguments], check=False, env=container_environment()
                )
        except (TimeoutError, OSError) as error:
            reason = str(error) or f"timed out after {timeout_s:g} s"
            raise DockerError(f"`{Path(self.executable).name} {arguments[0]}`: {reason}") from error
        out, err = (part.decode("utf-8", errors="replace") for part in (proc.stdout, proc.stderr))
        if proc.returncode != 0:
            raise DockerError(
                f"`{Path(self.executable).name} {arguments[0]}` exited with code "
                f"{proc.returncode}: {(err or out).strip()[-2000:]}"
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


PLAYWRIGHT = "local/playwright"
_RETRY_S = 0.2
_ATTEMPT_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class _PreparedImage:
    """An image that is ready to run, and the tools of its server."""

    image: str
    tools: ServerTools


class DockerTools(ToolSource, AsyncContextManagerMixin):
    """The tools of the containers that tasks name. Use as an async context manager.

    Without Docker and Podman, `local/playwright` is replaced by `fallback`.
    """

    def __init__(
        self,
        tasks: Iterable[ToolTask],
        *,
        folder: Path,
        run_id: str,
        fallback: ToolSource | None = None,
        tool_timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        max_containers: int = 8,
    ) -> None:
        """`tasks` are all tasks of the run, and `folder` holds their Dockerfile.NAME files.

        `fallback` must be open already. `run_id` labels the containers. Containers with the same
        label are removed at the start, so two processes must not share an id.
        """
        self._env_by_container: dict[str, dict[str, str]] = {}
        for task in tasks:
            if task.docker:
                self._env_by_container.setdefault(task.docker, task.docker_env)
        self._folder, self._run_id, self._fallback = folder, run_id, fallback
        self._tool_timeout_s, self._start_timeout_s = tool_timeout_s, start_timeout_s
        self._slots = anyio.Semaphore(max_containers)
        self._background = Background()
        self._engine: DockerEngine | None = None
        self._prepared: dict[str, _PreparedImage] = {}
        self._schemas: list[ToolSchema] = []
        self.notes: list[str] = []
        """Notes for the user, e.g. that a browser on this machine replaces a container."""

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with AsyncExitStack() as stack:
            if self._env_by_container:
                try:
                    self._engine = await find_engine(self._run_id)
                except NoEngineError as error:
                    self._use_fallback(error)
                else:
                    await stack.enter_async_context(self._background)
                    await self._prepare(self._engine)
            yield self

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas of all containers' tools, in the order of the tasks."""
        if self._fallback is not None and self._engine is None and self._env_by_container:
            return self._fallback.schemas
        return self._schemas

    def schemas_for(self, task: ToolTask) -> Sequence[ToolSchema]:
        """Returns the schemas of the task's own container; none for a task without one."""
        if task.docker is None:
            return []
        prepared = self._prepared.get(task.docker)
        return self.schemas if prepared is None else prepared.tools.schemas

    @property
    def keeps_state(self) -> bool:
        """True, since calls share the container's state."""
        return True

    @asynccontextmanager
    async def session(self, task: ToolTask) -> AsyncGenerator[ToolSession]:
        """Opens the tools of one rollout; its container starts with the first call."""
        if task.docker is None:
            yield _NoContainerSession()
        elif self._engine is None and self._fallback is not None:
            async with self._fallback.session(task) as session:
                yield session
        else:
            async with self._slots:
                session = _DockerSession(self, task)
                try:
                    yield session
                finally:
                    await session.close()

    @asynccontextmanager
    async def start_container(self, task: ToolTask) -> AsyncGenerator[MCPSession]:
        """Runs the task's container and yields a session with the server in it.

        Raises:
            CallFailedError: the container does not start, or its server does not answer.
        """
        engine, prepared = self._engine, self._prepared.get(task.docker or "")
        if engine is None or prepared is None:
            raise CallFailedError(
                FailureClass.TOOL_HOST, f"docker: {task.docker!r} was not prepared"
            )
        async with AsyncExitStack() as stack:
            try:
                container = await stack.enter_async_context(
                    engine.container(prepared.image, task.docker_env)
                )
                await self._wait_for_server(engine, container)
            except (DockerError, ConnectFailedError) as error:
                message = f"docker: {task.docker!r} failed to start for this rollout: {error}"
                raise CallFailedError(FailureClass.TOOL_HOST, message) from error
            spec = ServerSpec(url=container.url)
            session = MCPSession(
                SessionOpener(spec, self._background, timeout_s=self._start_timeout_s),
                prepared.tools.dialect,
                tool_timeout_s=self._tool_timeout_s,
            )
            stack.push_async_callback(session.close)
            yield session

    def _use_fallback(self, reason: NoEngineError) -> None:
        """Records that the fallback is used. Raises EngineError if tasks need other containers."""
        others = [docker for docker in self._env_by_container if docker != PLAYWRIGHT]
        if others or self._fallback is None:
            raise EngineError(
                f"tasks require docker: {[*others, PLAYWRIGHT][0]!r}, but no container engine is "
                f"available: {reason}",
                "start Docker or Podman (`docker info` must succeed), or remove the key `docker` "
                "from those rows and provide their tools otherwise (an MCP server, tools.py)",
            ) from reason
        self.notes.append(
            f"docker: {PLAYWRIGHT!r} was replaced with a browser on this machine, with the same "
            f"tool names ({_tool_names(self._fallback)}), since no container engine is "
            f"available: {reason}"
        )

    async def _prepare(self, engine: DockerEngine) -> None:
        """Removes leftover containers, prepares the images and lists their servers' tools."""
        try:
            await engine.remove_leftovers()
        except DockerError as error:
            raise EngineError(
                f"leftover containers of this run cannot be removed: {error}",
                f"check that `{engine.executable} ps` works, then run the same command again",
            ) from error
        for docker, env in self._env_by_container.items():
            image = await engine.prepare_image(docker, folder=self._folder)
            self._prepared[docker] = await self._probe(engine, docker, image, env)
        self._schemas = _merge_schemas(
            {docker: prepared.tools.schemas for docker, prepared in self._prepared.items()}
        )

    async def _probe(
        self, engine: DockerEngine, docker: str, image: str, env: Mapping[str, str]
    ) -> _PreparedImage:
        """Returns an image with its server's tools, listed in a temporary container."""
        try:
            async with engine.container(image, env) as container:
                return _PreparedImage(image, await self._wait_for_server(engine, container))
        except (DockerError, ConnectFailedError) as error:
            raise InputError(
                f"docker: {docker!r}: no MCP server responds in its container: {error}",
                f"the image must start a server on 0.0.0.0 port {MCP_PORT} (path /mcp); try "
                f"`{engine.executable} run --publish {MCP_PORT}:{MCP_PORT} {image}`",
            ) from error

    async def _wait_for_server(self, engine: DockerEngine, container: Container) -> ServerTools:
        """Returns the server's tools, once it answers.

        Raises:
            DockerError: the container has stopped.
            ConnectFailedError: the server did not answer in time.
        """
        spec = ServerSpec(url=container.url)
        deadline = anyio.current_time() + self._start_timeout_s
        while True:
            seconds_left = max(deadline - anyio.current_time(), _RETRY_S)
            timeout_s = min(seconds_left, _ATTEMPT_TIMEOUT_S)
            try:
                return await list_server_tools(
                    SessionOpener(spec, self._background, timeout_s=timeout_s)
                )
            except ConnectFailedError:
                log = await engine.log_if_stopped(container)
                if log is not None:
                    raise DockerError(f"the container stopped; its last output:\n{log}") from None
                if anyio.current_time() + _RETRY_S >= deadline:
                    raise
            await anyio.sleep(_RETRY_S)


class _DockerSession:
    """The tools in the container of one rollout."""

    def __init__(self, tools: DockerTools, task: ToolTask) -> None:
        self._tools, self._task = tools, task
        self._started = AsyncExitStack()
        self._session: MCPSession | None = None
        self._lock = anyio.Lock()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Runs one tool. If the server hangs or dies, the next call gets a new container.

        Raises:
            CallFailedError: no container can be started.
        """
        async with self._lock:
            if self._session is None:
                self._session = await self._started.enter_async_context(
                    self._tools.start_container(self._task)
                )
            result = await self._session.call(name, arguments)
            if not self._session.is_open:
                await self.close()
            return result

    async def close(self) -> None:
        """Removes the container, if there is one."""
        self._session = None
        await self._started.aclose()


class _NoContainerSession:
    """The session of a task without a container: every call is an error."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return error_result(f"{name} is not available: this task has no container")


def _tool_names(source: ToolSource) -> str:
    return ", ".join(schema["function"]["name"] for schema in source.schemas)


def _merge_schemas(schemas_by_docker: Mapping[str, Sequence[ToolSchema]]) -> list[ToolSchema]:
    """Returns the tools of all images. Raises InputError if two images differ in a tool."""
    merged: dict[str, tuple[str, ToolSchema]] = {}
    for docker, schemas in schemas_by_docker.items():
        for schema in schemas:
            name = schema["function"]["name"]
            other_docker, other_schema = merged.setdefault(name, (docker, schema))
            if other_schema != schema:
                raise InputError(
                    f"the tool {name!r} has different schemas in docker: {docker!r} and "
                    f"{other_docker!r}",
                    "run the tasks of each container separately",
                )
    return [schema for _, schema in merged.values()]

"""A scripted SkyPilot: its package's functions over a cloud that only keeps a list of clusters.

A call that the real package would not take fails: signatures are those of
`fixtures/rented/sky.json`, which `scripts/sky_signatures.py` wrote. Each call is a moment at which
our side may be killed.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fakes.moments import Moments

RECORDED = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "rented" / "sky.json").read_text(encoding="utf-8")
)
ClusterStatus = Enum("ClusterStatus", {name: name for name in RECORDED["statuses"]})
StatusRefreshMode = Enum("StatusRefreshMode", {name: name for name in RECORDED["refresh_modes"]})
PRICE = 2.5


@dataclass
class Cluster:
    """A cluster of the scripted cloud."""

    status: str = "INIT"
    belt: tuple[int, bool] | None = None
    jobs: list[str] = field(default_factory=list)


@dataclass
class ScriptedCloud:
    """What exists at the provider, whichever process of ours lives."""

    clusters: dict[str, Cluster] = field(default_factory=dict)
    requests: dict[str, tuple[str, Callable[[], Any]]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    launched: int = 0
    failing: dict[str, Exception] = field(default_factory=dict)
    """The errors that requests of a kind end with."""
    enabled: list[str] = field(default_factory=lambda: ["AWS", "Lambda"])
    """The clouds that the user has set up."""
    slow: int = 0
    """The looks for which a launch still goes on."""

    def let_time_pass(self) -> None:
        """Nothing of ours runs any more: each cluster's own belt puts it down."""
        for name, cluster in list(self.clusters.items()):
            if cluster.belt is not None and cluster.belt[1]:
                del self.clusters[name]

    def package(self, moments: Moments | None = None) -> SimpleNamespace:
        """Returns the package as a process of ours imports it."""
        return _Package(self, moments or Moments()).module()


def _listed(*values: Any) -> SimpleNamespace:
    return SimpleNamespace(**dict(zip(RECORDED["offer_fields"], values, strict=True)))


class _Error(Exception):
    pass


EXCEPTIONS = SimpleNamespace(**{name: type(name, (_Error,), {}) for name in RECORDED["exceptions"]})


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that takes what the real one of this name takes, as keywords."""
    kinds = {each.name: each for each in inspect._ParameterKind}
    signature = inspect.Signature(
        [
            inspect.Parameter(parameter, kinds[kind], default=default or inspect.Parameter.empty)
            for parameter, kind, default in RECORDED["functions"][name]
        ]
    )

    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(**signature.bind(*arguments, **keywords).arguments)

    return call


class _Package:
    def __init__(self, cloud: ScriptedCloud, moments: Moments) -> None:
        self._cloud, self._moments = cloud, moments

    def module(self) -> SimpleNamespace:
        names = ("launch", "exec", "status", "down", "get", "api_status")
        functions = {name: _checked(name, getattr(self, name)) for name in names}
        return SimpleNamespace(
            **functions,
            client=SimpleNamespace(
                sdk=SimpleNamespace(enabled_clouds=_checked("enabled_clouds", self.enabled_clouds))
            ),
            list_accelerators=_checked("list_accelerators", self.list_accelerators),
            exceptions=EXCEPTIONS,
            StatusRefreshMode=StatusRefreshMode,
            Task=_checked("Task", self.task),
            Resources=SimpleNamespace(
                from_yaml_config=_checked("Resources.from_yaml_config", self.resources)
            ),
        )

    def launch(
        self, task: Any, cluster_name: str, idle_minutes_to_autostop: int, down: bool
    ) -> str:
        def finish() -> Any:
            if "launch" in self._cloud.failing:
                raise self._cloud.failing["launch"]
            self._cloud.clusters.setdefault(cluster_name, cluster).status = "UP"
            return None, _handle()

        with self._call("launch"):
            self._cloud.launched += cluster_name not in self._cloud.clusters
            cluster = self._cloud.clusters.setdefault(cluster_name, Cluster())
            cluster.belt = (idle_minutes_to_autostop, down)
            cluster.jobs.append(task.run)
            return self._request("launch", finish)

    def exec(self, task: Any, cluster_name: str) -> str:
        with self._call("exec"):
            self._cloud.clusters[cluster_name].jobs.append(task.run)
            return self._request("exec", lambda: (1, _handle()))

    def status(self, cluster_names: list[str], refresh: Any) -> str:
        with self._call("status"):
            assert refresh is not StatusRefreshMode["NONE"], "a gone spot machine looks up"
            records = [
                {"name": name, "status": ClusterStatus[each.status], "handle": _handle()}
                for name, each in self._cloud.clusters.items()
                if name in cluster_names
            ]
            return self._request("status", lambda: records)

    def down(self, cluster_name: str) -> str:
        def finish() -> None:
            if "down" in self._cloud.failing:
                raise self._cloud.failing["down"]
            if cluster_name not in self._cloud.clusters:
                raise EXCEPTIONS.ClusterDoesNotExist(cluster_name)
            del self._cloud.clusters[cluster_name]

        with self._call("down"):
            return self._request("down", finish)

    def get(self, request_id: str) -> Any:
        with self._call("get"):
            return self._cloud.requests[request_id][1]()

    def api_status(self, request_ids: list[str], all_status: bool) -> list[Any]:
        with self._call("api_status"):
            return [self._state(each) for each in request_ids if each in self._cloud.requests]

    def enabled_clouds(self) -> str:
        with self._call("enabled_clouds"):
            return self._request("enabled_clouds", lambda: self._cloud.enabled)

    def list_accelerators(
        self,
        name_filter: str,
        region_filter: str | None,
        quantity_filter: int,
        clouds: list[str],
        case_sensitive: bool,
    ) -> dict[str, list[Any]]:
        assert (name_filter, quantity_filter, case_sensitive) == ("^H100$", 1, False)
        # As the catalogue has it: a cloud without spot machines says nan.
        rows = [("Lambda", 3.0, math.nan), ("AWS", 5.0, PRICE), ("GCP", PRICE / 2, None)]
        return {
            "H100": [
                _listed(cloud, "type", "H100", 1.0, 26.0, 79.65, 200.0, price, spot, "-")
                for cloud, price, spot in rows
                if cloud.lower() in clouds
            ]
        }

    def task(self, name: str, run: str | None) -> Any:
        return SimpleNamespace(
            name=name,
            run=run,
            set_resources=_checked("Task.set_resources", lambda resources: None),
        )

    def resources(self, config: dict[str, Any]) -> Any:
        if "accelerator" in config:
            raise ValueError("\x1b[31mInvalid resources YAML: accelerator\x1b[0m")
        return {json.dumps(config)}

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        with self._moments.around():
            self._cloud.calls.append(name)
            yield

    def _request(self, kind: str, finish: Callable[[], Any]) -> str:
        request_id = f"request-{len(self._cloud.requests)}"
        self._cloud.requests[request_id] = (kind, finish)
        return request_id

    def _state(self, request_id: str) -> SimpleNamespace:
        kind, finish = self._cloud.requests[request_id]
        if self._cloud.slow:
            self._cloud.slow -= 1
            return SimpleNamespace(status="RUNNING")
        if kind in self._cloud.failing:
            return SimpleNamespace(status="FAILED")
        finish()
        return SimpleNamespace(status="SUCCEEDED")


def _cost(seconds: float) -> float:
    return PRICE * seconds / 3600


def _handle() -> SimpleNamespace:
    resources = SimpleNamespace(get_cost=_checked("Resources.get_cost", _cost))
    return SimpleNamespace(launched_resources=resources, launched_nodes=1)

"""machines.yml is read strictly, and `where` takes the name of a Ray cluster too."""

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from stillroom.api.placement import resolve_machine
from stillroom.errors import ConfigError, InputError
from stillroom.evaluate.request import EvaluateModel
from stillroom.jobs.operations import load
from stillroom.remote.machine import Kind, Machine
from stillroom.remote.machines import (
    MachineEntry,
    all_machines,
    check_keys_allowed,
    find_machine,
    users_machines_file,
)
from stillroom.rollout.request import GenerateRollouts
from stillroom.settings import Workspace
from stillroom.train.config.request import StartTraining


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("STILLROOM_CONFIG", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    (tmp_path / "work").mkdir()
    return Workspace(tmp_path / "work")


def write(workspace: Workspace, text: str) -> Path:
    path = workspace.root / "machines.yml"
    path.write_text(text, encoding="utf-8")
    return path


def write_own(text: str) -> Path:
    users_machines_file().write_text(text, encoding="utf-8")
    return users_machines_file()


@pytest.mark.parametrize("name", ["start", "critic", "first_difference", "local", "a b"])
def test_what_where_means_otherwise_names_no_machine(workspace, name):
    """`where: start` was once what `takeover` is, and would be read as that."""
    write(workspace, f"{name}: {{ssh: me@host}}\n")
    with pytest.raises(ConfigError, match="is not a valid machine name"):
        all_machines(workspace)


def test_short_and_long_forms_name_the_same_things(workspace):
    write(
        workspace,
        """
gpu-box: {ssh: me@host, price_per_hour: 2.40}
tunnel:
  ssh: {host: root@127.0.0.1, port: 40022}
  folder: /data/stillroom
  python: /opt/conda/bin/python
  max_hours: 6
  keep_remote: true
sky-h100: {skypilot: {accelerators: "H100:1", use_spot: true, autostop: 15}}
jobs: {hf_jobs: a10g-large}
long-jobs: {hf_jobs: {flavor: a10g-large, timeout: 90m, namespace: mine}}
cluster: {ray: "ray://head:10001"}
""",
    )
    box, tunnel, sky, jobs, long_jobs, cluster = all_machines(workspace)
    assert box.ssh is not None
    assert (box.ssh.host, box.ssh.port, box.price_per_hour) == ("me@host", None, 2.4)
    assert (box.folder, box.max_hours, box.keep_remote) == ("~/.stillroom-remote", 24.0, False)
    assert tunnel.ssh is not None
    assert (tunnel.ssh.port, tunnel.python, tunnel.max_hours) == (40022, "/opt/conda/bin/python", 6)
    assert tunnel.keep_remote
    assert sky.skypilot is not None
    assert sky.skypilot.resources == {"accelerators": "H100:1", "use_spot": True}
    assert sky.skypilot.autostop == 15
    assert jobs.hf_jobs is not None
    assert (jobs.hf_jobs.flavor, jobs.hf_jobs.timeout) == ("a10g-large", "4h")
    assert long_jobs.hf_jobs is not None
    assert long_jobs.hf_jobs.namespace == "mine"
    assert cluster.ray is not None
    assert cluster.ray.address == "ray://head:10001"
    kinds = [m.access.kind for m in all_machines(workspace)]
    assert kinds == ["ssh", "ssh", "skypilot", "hf_jobs", "hf_jobs", "ray"]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a: {ssh: me@host, pric_per_hour: 2}", 1, "did you mean 'price_per_hour'"),
        ("a: {ssh: me@host}\nb:\n  ssh: me@host\n  max_hours: 0\n", 4, "greater than 0"),
        ("a:\n  price_per_hour: 2\n", 1, "exactly one of ssh"),
        ("a: {skypilot: {cpus: 4}, keep_remote: true}", 1, "keep_remote is not supported"),
        ("a: {ssh: h, ray: 'ray://h:1'}", 1, "exactly one of ssh"),
        ("a: {ssh: h, budget_usd: 5}", 1, "so it needs price_per_hour"),
        ("a: {ray: 'ray://h:1', budget_usd: 5}", 1, "not supported for a Ray cluster"),
        ("a: {ssh: }", 1, "exactly one of ssh"),
        ("a:\n  ssh: '-oProxyCommand=sh'\n", 2, "cannot begin with `-`"),
        ("a:\n  ssh:\n    host: '-oProxyCommand=sh'\n", 3, "cannot begin with `-`"),
        ("a: {ssh: ''}", 1, "host"),
        ("a: {ssh: me@}", 1, "host name is missing"),
        ("a: {ssh: localhost}", 1, "this machine"),
        ("a: {ssh: me@127.0.0.1}", 1, "this machine"),
        ("a: {ssh: {host: '::1', port: 22}}", 1, "this machine"),
        ("a: {ssh: 'me@host:2222'}", 1, "{host: me@host, port: 2222}"),
        ("a: {ssh: 'ssh://me@host'}", 1, "as ssh accepts it"),
        ("a: {ssh: 'me@host rm -rf'}", 1, "as ssh accepts it"),
        ("a: {ssh: h, folder: ../x}", 1, "absolute path"),
        ("a: {ssh: h, folder: '~'}", 1, "absolute path"),
        ("a: {ssh: h, python: -c}", 1, "interpreter"),
        ("a: {ssh: h}\na: {ssh: g}\n", 2, "already on line 1"),
        ("a: {ssh: h}\nlocal: {ssh: g}\n", 2, "not a valid machine name"),
        ("a: {ssh: h}\n../b: {ssh: g}\n", 2, "not a valid machine name"),
        ("- a\n", 1, "mapping of machine names"),
        ("a: [ssh\nb: c\n", 2, "cannot be parsed"),
        ("a: host\n", 1, "must be a mapping"),
        ("? [a]\n: {ssh: h}\n? [b]\n: {ssh: g}\n", 1, "cannot be parsed"),
        # PyYAML reads only the key `=` of a mapping that is tagged as a string.
        ("a: !!str\n  ? [b]\n  : 1\n  ? [c]\n  : 2\n  =: h\n", 1, "must be a mapping"),
        ("a: {hf_jobs: {flavor: x, timeout: soon}}", 1, "timeout"),
        ("a: {skypilot: {autostop: 5}}", 1, "resources"),
    ],
)
def test_a_fault_is_named_with_its_file_and_line(workspace, text, line, problem):
    path = write(workspace, text)
    with pytest.raises(ConfigError) as caught:
        all_machines(workspace)
    assert caught.value.problem.startswith(f"{path}:{line}: ")
    assert problem in caught.value.problem


def test_the_projects_machine_wins_over_the_users_of_the_same_name(workspace):
    write(workspace, "a: {ssh: project}\n")
    write_own("a: {ssh: own}\nb: {ssh: {host: other, options: [-F, /etc/ssh/lab]}}\n")
    first, second = all_machines(workspace)
    assert (first.ssh.host, second.ssh.host) == ("project", "other")
    assert second.ssh.options == ["-F", "/etc/ssh/lab"]


def test_a_machine_that_nobody_named_is_refused_with_the_nearest_one(workspace):
    write(workspace, "gpu-box: {ssh: h}\n")
    with pytest.raises(InputError, match="did you mean 'gpu-box'"):
        find_machine(workspace, "gpu-bx")
    with pytest.raises(InputError) as caught:
        find_machine(workspace, "localhost")
    assert caught.value.fix == "leave `where` out to run locally"


def test_a_machine_of_the_workspace_gets_neither_options_nor_keys(workspace):
    write(workspace, "a: {ssh: {host: h, options: ['-oProxyCommand=sh -c evil']}}\n")
    with pytest.raises(ConfigError, match=r"ssh\.options can make ssh run any local program"):
        all_machines(workspace)
    write(workspace, "a: {ssh: me@h}\n")
    machine = find_machine(workspace, "a")
    check_keys_allowed(workspace, machine, [])
    with pytest.raises(InputError) as caught:
        check_keys_allowed(workspace, machine, ["OPENAI_API_KEY"])
    assert str(users_machines_file()) in caught.value.fix
    own_keys = users_machines_file().with_name("keys.yml")
    own_keys.write_text("- {key: OPENAI_API_KEY, host: h}\n", encoding="utf-8")
    check_keys_allowed(workspace, machine, ["OPENAI_API_KEY"])


def test_the_users_file_does_not_count_as_own_within_the_workspace(workspace, monkeypatch):
    monkeypatch.setenv("STILLROOM_CONFIG", str(workspace.root))
    write(workspace, "a: {ssh: me@h}\n")
    with pytest.raises(InputError, match="OPENAI_API_KEY"):
        check_keys_allowed(workspace, find_machine(workspace, "a"), ["OPENAI_API_KEY"])


@pytest.fixture
def cluster_workspace(tmp_path: Path) -> Workspace:
    text = "cluster: {ray: {address: 'ray://head:10001', workers: 4}}\nplain: {ray: head:6379}\n"
    (tmp_path / "machines.yml").write_text(text, encoding="utf-8")
    return Workspace(tmp_path)


def test_rollouts_go_over_the_cluster(cluster_workspace):
    request = GenerateRollouts(model="m", input="prompts.txt", where="cluster", temperature=0.2)
    given, machine = resolve_machine(cluster_workspace, request)
    assert machine is None
    assert (given.where, given.ray_address, given.ray_workers) == (None, "ray://head:10001", 4)
    assert given.temperature == 0.2
    assert given.model_fields_set >= {"input", "temperature", "ray_address"}
    own = GenerateRollouts(model="m", input="prompts.txt", where="cluster", ray_workers=9)
    assert resolve_machine(cluster_workspace, own)[0].ray_workers == 9


def test_training_is_launched_by_the_cluster(cluster_workspace):
    request = StartTraining(where="cluster", overrides=("trainer.num_epochs=2",))
    given, machine = resolve_machine(cluster_workspace, request)
    assert machine is None
    assert given.overrides == (
        "trainer.num_epochs=2",
        "launcher.kind=ray",
        "launcher.address=ray://head:10001",
        "launcher.num_processes=4",
    )
    own = StartTraining(where="cluster", overrides=("launcher.num_processes=2",))
    assert "launcher.num_processes=4" not in resolve_machine(cluster_workspace, own)[0].overrides
    plain = resolve_machine(cluster_workspace, StartTraining(where="plain"))[0]
    assert plain.overrides == ("launcher.kind=ray", "launcher.address=head:6379")


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            GenerateRollouts(model="m", input="p", where="cluster", ray_address="auto"),
            "both name a Ray",
        ),
        (StartTraining(where="cluster", budget_usd=5), "stillroom cannot stop"),
        (EvaluateModel(where="cluster", model="m", data="p"), "only generate_rollouts"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(cluster_workspace, request_, text):
    with pytest.raises(InputError, match=text):
        resolve_machine(cluster_workspace, request_)


def test_each_kind_is_a_section_of_an_entry_and_a_field_that_says_how_it_is_reached():
    fields = {field.name: get_args(field.type) for field in msgspec.structs.fields(Machine)}
    for kind in get_args(Kind):
        assert kind in MachineEntry.model_fields
        [access] = [part for part in fields[kind] if part is not type(None)]
        assert access.kind == kind
        assert (access.released_by is not None) == access.is_provisioned
        for name in filter(None, (access.opened_by, access.released_by)):
            assert callable(load(name))
    assert len(Machine(name="one").kinds) == len(get_args(Kind))

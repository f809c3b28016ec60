"""Builds the environments of child processes from allowlists of variables.

No allowlist includes the API keys of endpoints. A run's process gets these through a pipe, and only
the client that sends a key reads it.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from stillroom.secrecy.redaction import is_secret_name

_SYSTEM = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TERM|COLUMNS|TMPDIR|TEMP|TMP|PWD"
    r"|LD_LIBRARY_PATH|DYLD_\w+|XDG_\w+|VIRTUAL_ENV|CONDA_\w+|PYTHON\w+|FONTCONFIG_PATH"
    r"|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|NODE_EXTRA_CA_CERTS"
    r"|CUDA_\w+|NVIDIA_\w+|ROCR_\w+|HIP_\w+|HSA_\w+|OMP_\w+|MKL_\w+|OPENBLAS_\w+|KMP_\w+"
    r"|GOMP_\w+|MALLOC_\w+|STILLROOM_\w+|COVERAGE_\w+"
)
"""Variables for any program: paths, locale, CPU and GPU settings."""
_LIBRARIES = re.compile(
    r"HF_\w+|HUGGING_?FACE_\w+|TRANSFORMERS_\w+|TOKENIZERS_\w+|DATASETS_\w+|TORCH\w*|PYTORCH_\w+"
    r"|NCCL_\w+|GLOO_\w+|UCX_\w+|FI_\w+|ACCELERATE_\w+|FSDP_\w+|TRITON_\w+|XLA_\w+|BNB_\w+"
    r"|LLAMA_CPP|CC|CXX|MASTER_(ADDR|PORT)|SLURM_\w+|RAY_\w+|WANDB_\w+|TRACKIO_\w+|PLAYWRIGHT_\w+"
    r"|DOCKER_\w+|CONTAINERS?_\w+|PODMAN_\w+|REGISTRY_AUTH_FILE|SSH_AUTH_SOCK|NUMEXPR_\w+"
)
"""Settings of the libraries that a run loads, and of the container engine that it calls."""
_PROGRAMS = re.compile(
    r"NODE_\w+|NPM_CONFIG_\w+|NVM_\w+|UV_\w+|PIP_\w+|DENO_\w+|BUN_\w+|JAVA_HOME|GOPATH"
    r"|PLAYWRIGHT_\w+|DISPLAY|WAYLAND_DISPLAY|DBUS_SESSION_BUS_ADDRESS",
    re.IGNORECASE,
)
"""Settings of the programs that start MCP servers, such as npx and uvx."""
SHARED_SECRETS = "STILLROOM_SECRETS"
"""The variable with the secrets of a multi-process run: a JSON object of values by name."""
_CLOUDS = re.compile(
    r"SKYPILOT_\w+|SKY_\w+|AWS_\w+|GOOGLE_\w+|CLOUDSDK_\w+|AZURE_\w+|ARM_\w+|KUBECONFIG|KUBE_\w+"
    r"|OCI_\w+|LAMBDA_\w+|RUNPOD_\w+|VAST_\w+|NEBIUS_\w+|PAPERSPACE_\w+|DO_\w+|IBM_\w+"
)
"""Settings of SkyPilot and of the clouds' own packages, including their keys."""
_HUB_TOKENS = frozenset({"HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN"})
"""Tokens in the environment of a run's process, which needs them to download models."""
PIPED_VARIABLES = "STILLROOM_PIPED_VARIABLES"
"""The variable with the comma-separated names of the secrets that a run's process reads from its
standard input and sets in its own environment, where libraries look for them."""
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The variable with which torch's idle threads sleep instead of spinning, which is many times
faster on a busy machine. Torch reads it when it is imported."""
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})


def run_environment(workspace: Path | None = None) -> dict[str, str]:
    """Returns the environment of a run's process.

    Its only secrets are the Hub's tokens, and the variables that keys.yml allows for the tools that
    the run starts.
    """
    tools = _tool_variables(workspace)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _HUB_TOKENS
        or name in tools
        or name.lower() in _PROXIES
        or _is_listed(name, _SYSTEM)
        or _is_listed(name, _LIBRARIES)
        or _is_listed(name, _PROGRAMS)
    }
    return kept | PASSIVE_THREADS


def provisioning_environment(workspace: Path | None = None) -> dict[str, str]:
    """Returns the environment of the process that provisions machines; it has the clouds' keys."""
    clouds = {k: v for k, v in os.environ.items() if _CLOUDS.fullmatch(k) is not None}
    return run_environment(workspace) | clouds


def tool_environment() -> dict[str, str]:
    """Returns the environment of tools.py, rewards.py, MCP servers and third-party programs.

    Its only secrets are those that the user's keys.yml allows for tools.
    """
    tools = _tool_variables()
    allowed = {
        name: value
        for name, value in os.environ.items()
        if name in tools or (_is_listed(name, _PROGRAMS) and not _has_credentials(value))
    }
    return bare_environment() | allowed


def bare_environment() -> dict[str, str]:
    """Returns an environment without secrets, for programs that read untrusted data."""
    return {
        name: value
        for name, value in os.environ.items()
        if _is_listed(name, _SYSTEM) or (name.lower() in _PROXIES and not _has_credentials(value))
    }


def container_environment() -> dict[str, str]:
    """Returns the environment of a container engine's command line, such as docker or podman."""
    engine = re.compile(r"(DOCKER|CONTAINERS?|PODMAN)_\w+|REGISTRY_AUTH_FILE|SSH_AUTH_SOCK")
    settings = {k: v for k, v in os.environ.items() if _is_listed(k, engine)}
    return bare_environment() | settings


def ssh_environment() -> dict[str, str]:
    """Returns the environment of ssh. It has no API keys, which `SendEnv` could forward."""
    agent_names = re.compile(r"SSH_AUTH_SOCK|SSH_AGENT_PID|KRB5CCNAME|DISPLAY|WAYLAND_DISPLAY")
    agents = {name: value for name, value in os.environ.items() if agent_names.fullmatch(name)}
    # The ssh process of a jump host gets no BatchMode option, and could open a password dialog.
    return bare_environment() | agents | {"SSH_ASKPASS_REQUIRE": "never"}


def shared_variables(secrets: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that pass a run's secrets on to its worker processes."""
    by_name = {name: value for name, value in secrets.items() if name.isidentifier()}
    return by_name | {SHARED_SECRETS: json.dumps(dict(secrets))} if secrets else {}


def shared_secrets() -> dict[str, str]:
    """Returns the secrets of the run whose worker process this is; empty in any other process."""
    return json.loads(os.environ.get(SHARED_SECRETS, "{}"))


def _is_listed(name: str, names: re.Pattern[str]) -> bool:
    """Returns whether a variable is in an allowlist and does not have a secret's name."""
    return names.fullmatch(name) is not None and (
        name == "SSH_AUTH_SOCK" or not is_secret_name(name)
    )


def _has_credentials(address: str) -> bool:
    """Returns whether an address contains credentials, or cannot be parsed."""
    try:
        return "@" in urlsplit(address if "://" in address else f"http://{address}").netloc
    except ValueError:
        return True


def _tool_variables(workspace: Path | None = None) -> frozenset[str]:
    # The libraries that read keys.yml take longer to load than the rest of a small process, such as
    # the guard of MCP servers, which never needs keys.yml.
    from stillroom.secrecy.keys import tool_variables

    return tool_variables(workspace)

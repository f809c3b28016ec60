"""Prints the signatures of those functions of SkyPilot that we call, as JSON.

SkyPilot is too large to be installed where the tests run. In an environment of its own:
`pip install skypilot && python scripts/sky_signatures.py > tests/fixtures/rented/sky.json`.
The scripted back end of the tests is compared with that file.
"""

import inspect
import json
import sys

import sky
import sky.client.sdk
from sky.catalog.common import InstanceTypeInfo

CALLED = {
    "launch": sky.launch,
    "exec": sky.exec,
    "status": sky.status,
    "down": sky.down,
    "get": sky.get,
    "api_status": sky.api_status,
    "enabled_clouds": sky.client.sdk.enabled_clouds,
    "list_accelerators": sky.list_accelerators,
    "Task": sky.Task.__init__,
    "Task.set_resources": sky.Task.set_resources,
    "Resources.from_yaml_config": sky.Resources.from_yaml_config,
    "Resources.get_cost": sky.Resources.get_cost,
}


def parameters(function: object) -> list[list[str]]:
    """Returns name, kind and default of each public parameter."""
    return [
        [each.name, each.kind.name, "" if each.default is each.empty else str(each.default)]
        for each in inspect.signature(function).parameters.values()
        if each.name != "self" and not each.name.startswith("_")
    ]


def main() -> None:
    """Prints one JSON object."""
    found = {
        "version": sky.__version__,
        "statuses": [each.value for each in sky.ClusterStatus],
        "refresh_modes": [each.name for each in sky.StatusRefreshMode],
        "exceptions": [
            name
            for name in ("ClusterDoesNotExist", "NoCloudAccessError", "ResourcesUnavailableError")
            if hasattr(sky.exceptions, name)
        ],
        "offer_fields": list(InstanceTypeInfo._fields),
        "functions": {name: parameters(function) for name, function in CALLED.items()},
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

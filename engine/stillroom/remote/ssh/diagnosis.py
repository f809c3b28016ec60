"""What ssh's own words about a connection mean, and what a user can do about it."""

import re

from stillroom.errors import EngineError
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.machine import SshAddress

_MACHINES = "machines.yml"
_KEYGEN = re.compile(r"ssh-keygen -f .*")
_CONFIG = re.compile(r"Bad (owner|configuration|permissions)|terminating, \d+ bad|percent_expand")


class LoginRefusedError(MachineError):
    """The machine did not accept any of the user's keys."""


def broken_connection(name: str, address: SshAddress, printed: str) -> EngineError:
    """Returns the error for a connection that broke or was never made, from what ssh printed."""
    last = " ".join(printed.split())[-500:] or "the connection broke"
    by_hand = ssh_command(address)
    if "IDENTIFICATION HAS CHANGED" in printed:
        return _changed_key(name, address, printed)
    if "Host key verification failed" in printed or "host key is known" in printed:
        return MachineError(
            f"{name} ({address.host}) is not known to your ssh yet: {last}",
            f"run `{by_hand}` once by hand, compare the key's fingerprint with the machine's, and "
            "accept it; stillroom never accepts a key for you",
        )
    if "Permission denied" in printed or "Too many authentication failures" in printed:
        return LoginRefusedError(
            f"{name} ({address.host}) did not let us log in: {last}",
            f"see whether the user is right (`user@host` in machines.yml, or User in "
            f"~/.ssh/config), and make `{by_hand}` work without a password: put your public key "
            "there (`ssh-copy-id`), or unlock the key here (`ssh-add`), or name it in "
            "~/.ssh/config; if it asks for a code each time, hold a connection open that ssh "
            "shares (ControlMaster, ControlPath and ServerAliveInterval in ~/.ssh/config), which "
            "is then used",
        )
    if _CONFIG.search(printed):
        return MachineError(
            f"ssh refuses its own settings for {name}: {last}",
            f"mend the file that it names, until `{by_hand}` works",
        )
    return _unreachable(name, address, printed, last)


def _unreachable(name: str, address: SshAddress, printed: str, last: str) -> UnreachableError:
    by_hand = ssh_command(address)
    if "Could not resolve hostname" in printed:
        fix = (
            f"check the network here and the name {address.host!r} in {_MACHINES} and "
            f"~/.ssh/config: `{by_hand}`"
        )
        return UnreachableError(f"no machine is called {address.host!r} ({name}): {last}", fix)
    if "Connection refused" in printed:
        fix = f"check that the machine is up and its port right (`port:` in {_MACHINES})"
        return UnreachableError(f"{name} ({address.host}) refuses connections: {last}", fix)
    return UnreachableError(
        f"{name} ({address.host}) does not answer: {last}",
        f"it is tried again; if it stays so, see whether `{by_hand}` works",
    )


def _changed_key(name: str, address: SshAddress, printed: str) -> MachineError:
    quoted = _KEYGEN.search(printed)
    command = quoted[0].strip() if quoted else f"ssh-keygen -R {address.host}"
    return MachineError(
        f"the host key of {name} ({address.host}) has changed: it is a new machine, or somebody "
        "stands between",
        "find out which from whoever runs it. Only if it is rightly new, you (never stillroom) "
        f"remove the old key with `{command}`, then `{ssh_command(address)}` to accept the new one",
    )


def ssh_command(address: SshAddress) -> str:
    """Returns the command by which a user tries the same connection."""
    port = [] if address.port is None else ["-p", str(address.port)]
    return " ".join(["ssh", *address.options, *port, address.host])

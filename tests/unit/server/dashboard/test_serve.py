"""How the dashboard begins: on the loopback, and not where another program listens."""

import socket

import pytest

from stillroom.errors import InputError
from stillroom_mcp.dashboard.serve import listen


def test_it_listens_on_the_loopback_alone() -> None:
    with listen(0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_refused_with_a_way_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(InputError, match="cannot be used") as refused:
            listen(other.getsockname()[1])
        assert "--port" in refused.value.fix

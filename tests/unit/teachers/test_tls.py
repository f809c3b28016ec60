"""Certificates are read once, and those that the user names are the only ones."""

import ssl
from pathlib import Path

import certifi
import pytest

from stillroom.errors import InputError
from stillroom.teachers.tls import client_context


@pytest.fixture(autouse=True)
def no_named_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_all_clients_share_one_context_that_verifies_servers() -> None:
    context = client_context()
    assert context is client_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


def test_what_the_user_names_replaces_the_certificates_of_system_and_certifi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = client_context()
    first, *_ = Path(certifi.where()).read_text().split("-----END CERTIFICATE-----")
    (tmp_path / "ours.pem").write_text(f"{first}-----END CERTIFICATE-----\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ours.pem"))
    assert len(client_context().get_ca_certs()) == 1 < len(everything.get_ca_certs())


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ours.pem")
    with pytest.raises(InputError, match=r"/nowhere/ours\.pem"):
        client_context()

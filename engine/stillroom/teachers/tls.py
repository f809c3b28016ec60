"""The certificates that the HTTP clients of this process trust."""

import functools
import os
import ssl

from stillroom.errors import InputError


def client_context() -> ssl.SSLContext:
    """Returns the context with which each client verifies the certificates of servers.

    It trusts the certificates of the system, which may include a company's own, and those of
    certifi, since some systems have none. SSL_CERT_FILE or SSL_CERT_DIR replaces both. Reading them
    takes 50 ms, so it is done once. Raises InputError if they cannot be read.
    """
    return _context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.lru_cache(maxsize=1)
def _context(file: str | None, folder: str | None) -> ssl.SSLContext:
    # Imported here, so that the server starts faster.
    import httpx

    try:
        context = httpx.create_ssl_context()
    except OSError as error:
        raise InputError(
            f"the certificates in {file or folder or 'certifi'} cannot be read: {error}",
            "correct SSL_CERT_FILE or SSL_CERT_DIR, or unset them",
        ) from error
    if not (file or folder):
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return context

"""Tells by its name whether a variable or a key of a document holds a secret."""

import functools
import re

# Each word must end there, so AWS_ACCESS_KEY_ID and APIKEY match, TOKENIZERS_PARALLELISM and
# max_tokens do not.
_SECRET_NAME = re.compile(
    r"((KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|JWT|_PAT|_PWD|^PAT)S?|TOKEN"
    r"|(API|ACCESS|AUTH)[-_]?TOKENS)(?=[-_.]|\d|$)|(^|[-_])AUTH(ORIZATION)?$",
    re.IGNORECASE,
)
_NAMES_OF_NAMES = re.compile(r"(^|[-_.])(api_key_env|eos_token|pad_token|bos_token)$")


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Returns whether a variable, option or key with this name holds a secret."""
    return _SECRET_NAME.search(name) is not None and not _NAMES_OF_NAMES.search(name)

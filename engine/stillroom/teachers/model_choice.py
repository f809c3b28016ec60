"""Resolves the model in a request, judge.yml or critic.yml to an endpoint or files, and a price."""

from pathlib import Path
from typing import Any, Self, TypeVar, cast

import yaml
from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from stillroom.errors import DocumentError, InputError
from stillroom.lineage import ModelRecord
from stillroom.models.resolve import ModelLocation, locate_model
from stillroom.secrecy.readable import parse_error_message
from stillroom.settings import Workspace
from stillroom.teachers.pricing import FREE, Price, price_for, require_price
from stillroom.teachers.providers import (
    IN_PROCESS,
    PROVIDERS,
    Endpoint,
    ProviderName,
    endpoint_for,
    provider_of,
    terms_of,
)
from stillroom.validation import StrictModel, describe_errors
from stillroom.yaml_text import read_yaml


class ModelChoice(StrictModel):
    """The fields of a request or a file that name a model and where it runs."""

    model: str
    provider: ProviderName = "openai"
    base_url: str | None = None
    api_key_env: str | None = None
    """The name of the environment variable with the key."""

    @model_validator(mode="wrap")
    @classmethod
    def _provider_by_name(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Sets a missing provider: openai if there is a base_url, else by the model's name."""
        if not isinstance(data, dict) or "provider" in data:
            return handler(data)
        fields = cast("dict[str, Any]", data)
        has_base_url = fields.get("base_url") is not None
        provider = "openai" if has_base_url else provider_of(str(fields.get("model", "")))
        if provider is None:
            return handler(fields)
        choice = handler({**fields, "provider": provider})
        choice.model_fields_set.discard("provider")
        return choice

    @property
    def is_provider_inferred(self) -> bool:
        """Whether the provider was inferred from the model's name."""
        is_set = "provider" in self.model_fields_set or self.base_url is not None
        return not is_set and provider_of(self.model) is not None

    @property
    def is_in_process(self) -> bool:
        """Whether the model is loaded into this process."""
        return self.provider in IN_PROCESS

    @property
    def terms(self) -> str | None:
        """The URL of the provider's terms on the use of outputs; None if none are known."""
        return terms_of(self.provider, self.base_url)

    def locate(self, workspace: Workspace, *, needs_key: bool = True) -> Endpoint | ModelLocation:
        """Returns the endpoint, or the location of a model that is loaded into this process.

        Without `needs_key` no call will be made, so the key need not be set.
        Raises InputError if the model is not found, or the endpoint cannot be called.
        """
        if not self.is_in_process:
            return endpoint_for(
                workspace,
                self.provider,
                base_url=self.base_url,
                api_key_env=self.api_key_env,
                needs_key=needs_key,
            )
        if self.base_url is not None:
            raise InputError(
                f"base_url cannot be used with provider {self.provider!r}",
                "use provider openai for an endpoint, or remove base_url",
            )
        lacks_prefix = self.provider == "demo" and not self.model.startswith("demo/")
        return locate_model(workspace, f"demo/{self.model}" if lacks_prefix else self.model)

    def price(self, workspace: Workspace, *, is_needed: bool = False) -> Price | None:
        """Returns the price of the model's tokens; None if it is unknown.

        Raises InputError instead if the price `is_needed`, for a budget in dollars.
        """
        if self.is_in_process or PROVIDERS[self.provider].is_local:
            return FREE
        return (require_price if is_needed else price_for)(workspace, self.model)

    def record(self, role: str) -> ModelRecord:
        """Returns the manifest record of a model behind an endpoint."""
        location = self.base_url or self.provider
        return ModelRecord(role=role, name=self.model, location=location, terms=self.terms)


_ModelFile = TypeVar("_ModelFile", bound=ModelChoice)


def read_model_file(path: Path, kind: type[_ModelFile], *, what: str, fix: str) -> _ModelFile:
    """Returns the content of a judge.yml or critic.yml as a `kind`.

    what: the file's role, for the error. Raises DocumentError if the file is malformed.
    """
    try:
        return kind.model_validate(read_yaml(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        problem = f"{path}: {describe_errors(error, kind)}"
        raise DocumentError(f"the {what} {problem}", fix) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DocumentError(f"the {what} {parse_error_message(path, error)}", fix) from error

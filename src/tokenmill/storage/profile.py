"""Settings of object stores from the environment, and for S3 from the AWS profile files.

The environment goes to the clients as it is (AWS_ACCESS_KEY_ID, AZURE_STORAGE_ACCOUNT_KEY, ...). Where it
holds no keys of S3, the profile's files are looked at: AWS_PROFILE names it, "default" otherwise.
"""

from __future__ import annotations

import configparser
import os
import re
from pathlib import Path
from typing import Any

from tokenmill.errors import RecipeError

_FIELDS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


def endpoint_of(scheme: str) -> str:
    """The server that the environment names for URLs of this kind; empty if it is the cloud's own."""
    name = next((name for name in _ENDPOINTS[scheme] if os.environ.get(name)), None)
    return "" if name is None else _checked(os.environ[name], name)


def _checked(endpoint: str, where: str) -> str:
    """An endpoint with which a client can begin something. Its text is not shown: it may hold a secret."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
        raise RecipeError(f"{where} is no address of a server", hint="write it like https://minio.example.org:9000")
    return endpoint


def s3_settings() -> dict[str, Any]:
    """What the client does not find in the environment by itself; `allow_http` if its endpoint is not encrypted."""
    settings: dict[str, Any] = {}
    if "AWS_ACCESS_KEY_ID" not in os.environ:
        settings = _profile(os.environ.get("AWS_PROFILE", ""))
    endpoint = endpoint_of("s3") or _checked_profile(settings)
    if endpoint:
        settings["endpoint"] = endpoint
        settings["allow_http"] = endpoint.startswith("http://")
    if "AWS_REGION" in os.environ or "AWS_DEFAULT_REGION" in os.environ:
        settings.pop("region", None)
    return settings


def _checked_profile(settings: dict[str, Any]) -> str:
    return _checked(settings["endpoint"], "the endpoint_url of the profile") if settings.get("endpoint") else ""


def _profile(name: str) -> dict[str, Any]:
    """The static keys, region and endpoint of a profile. None if there is no such thing and none was asked for."""
    found: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", f"profile {name}" if name and name != "default" else "default"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name or "default"),
    ):
        parser = configparser.RawConfigParser()
        path = Path(os.environ.get(variable, default)).expanduser()
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except OSError:
            continue
        except (configparser.Error, UnicodeDecodeError):
            raise RecipeError(f"{path} cannot be read", hint="it holds sections of `name = value` lines") from None
        if parser.has_section(section):
            found |= dict(parser.items(section))
    if name and not found:
        raise RecipeError(f"there is no AWS profile {name!r}", hint="check AWS_PROFILE and ~/.aws/config")
    if name and "aws_access_key_id" not in found:
        raise RecipeError(
            f"the AWS profile {name!r} holds no keys of its own",
            hint="put short-lived ones into the environment: aws configure export-credentials --format env",
        )
    return {ours: found[theirs] for theirs, ours in _FIELDS.items() if theirs in found}

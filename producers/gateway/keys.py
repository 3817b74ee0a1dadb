"""API keys: who may ask, for which tenant, and whether what they ask is recorded.

Only hashes are kept. A key is a long random string, so one round of SHA-256 is enough. What follows a `#` in a
presented key names the session: `sk-abc#run-17`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from ...schemas.errors import ConfigError
from .errors import RequestError

LOCAL_TENANT = "local"
_HASH = re.compile(r"[0-9a-f]{64}")
_SESSION = re.compile(r"[\x21-\x7e]{1,200}")


class Key(BaseModel):
    """One entry of the keys file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    """Hex digest of the key."""
    tenant: str
    policy: str | None = None
    """Which policy it may ask; None: the gateway's."""
    capture: bool = True
    """False: its requests are served and leave no trace."""

    @field_validator("sha256")
    @classmethod
    def _digest(cls, value: str) -> str:
        value = value.lower().removeprefix("sha256:")
        if not _HASH.fullmatch(value):
            raise ValueError("write the 64 hex digits of the key's SHA-256, never the key itself")
        return value


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[Key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks."""

    tenant: str
    capture: bool = True
    session: str | None = None
    """What the key names it, if it does."""


class KeyRing:
    """The known keys; without any, everyone is the local tenant."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = {k.sha256: k for k in keys}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """By `Authorization: Bearer` or `x-api-key`. Raises RequestError 401."""
        key, _, session = _presented(headers).partition("#")
        if session and not _SESSION.fullmatch(session):
            raise RequestError(
                "the session in the API key must be 1 to 200 visible ASCII characters", status=401
            )
        if not self._keys:
            return Caller(tenant=LOCAL_TENANT, session=session or None)
        if not key:
            raise RequestError(
                "no API key: send `Authorization: Bearer <key>` or `x-api-key`",
                status=401,
                code="invalid_api_key",
            )
        found = self._keys.get(digest(key))
        if found is None:
            raise RequestError("this API key is not known here", status=401, code="invalid_api_key")
        return Caller(tenant=found.tenant, capture=found.capture, session=session or None)


def digest(key: str) -> str:
    """What the keys file holds of `key`."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def make_key(tenant: str) -> tuple[str, str]:
    """(a new key, its entry for the keys file)."""
    key = f"hr-{secrets.token_urlsafe(32)}"
    return key, f'[[keys]]\nsha256 = "{digest(key)}"\ntenant = {json.dumps(tenant)}\n'


def load_keys(path: Path | None, *, policy: str) -> KeyRing:
    """The keys in a TOML file of `[[keys]]` tables. Raises ConfigError."""
    if path is None:
        return KeyRing()
    try:
        found = _File.model_validate(tomllib.loads(path.read_text())).keys
    except (OSError, ValueError) as e:
        if isinstance(e, ValidationError):
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"gateway.keys_file {path}: {where}: {first['msg']}") from None
        raise ConfigError(f"gateway.keys_file {path} cannot be read: {e}") from None
    for i, key in enumerate(found):
        if key.policy not in (None, policy):
            raise ConfigError(
                f"gateway.keys_file {path}: keys.{i}: policy {key.policy!r} is not served here, this gateway's is {policy!r}"
            )
    return KeyRing(found)


def check_address(host: str, ring: KeyRing) -> None:
    """Raise ConfigError where a gateway without keys would listen to others than this machine."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not ring:
        raise ConfigError(
            f"gateway.host is {host!r} and there are no keys: anyone could use the model. "
            "Set gateway.keys_file, or use 127.0.0.1"
        )


def _presented(headers: Mapping[str, str]) -> str:
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key", "").strip()

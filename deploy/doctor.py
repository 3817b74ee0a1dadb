"""`headrace doctor`: what this machine has, what a run would use, and what is missing."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..schemas.config import Config
from ..schemas.errors import ConfigError
from ..streams.sandbox.layers import probe
from .broker import apache, embedded
from .broker.choice import broker_reason, choose_kind
from .broker.limits import LIMITS
from .doctor_engine import engine_kind, vllm_here
from .model_dir import check_model_dir
from .processes import accepts, free_port, require_free_port

PACKAGES = ("torch", "transformers", "kafka-python", "faust-streaming", "aiokafka", "pyarrow", "pydantic")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check."""

    level: Literal["ok", "note", "error"]
    check: str
    detail: str

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def diagnose(config: Config) -> list[Finding]:
    """All checks, each on its own: one that fails does not stop the others."""
    return [
        _python(),
        *_packages(),
        *_brokers(config),
        _bootstrap(config),
        _model(config),
        _checked("engine", lambda: engine_kind(config)),
        _checked("vllm", vllm_here, level="note"),
        _sandbox(config),
        *_ports(config),
    ]


def _checked(check: str, look: Callable[[], str], *, level: Literal["note", "error"] = "error") -> Finding:
    try:
        return Finding("ok", check, look())
    except ConfigError as e:
        return Finding(level, check, str(e))


def _python() -> Finding:
    fine = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Finding(
        "ok" if fine else "error",
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}"
        + ("" if fine else "; headrace needs 3.11 to 3.13"),
    )


def _packages() -> list[Finding]:
    findings = []
    for name in ("headrace", *PACKAGES):
        try:
            findings.append(Finding("ok", name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding("error", name, "not installed: pip install ."))
    return findings


def _brokers(config: Config) -> list[Finding]:
    def chosen() -> str:
        return broker_reason(config.kafka)

    def kafka() -> str:
        kind, home = choose_kind(config.kafka.model_copy(update={"broker": "auto"}))
        if kind != "kafka" or home is None:
            raise ConfigError(
                "none: `headrace broker fetch` brings it (fine: the embedded broker does without)"
            )
        return f"{len(apache.find_jars(home))} jars in {home}"

    def java() -> str:
        found = apache.find_java()
        return f"{apache.java_title(found)}: {found}"

    return [
        _checked("broker", chosen),
        _checked("embedded broker", lambda: str(embedded.find_binary()), level="note"),
        *(Finding("note", "embedded broker", f"limit: {text}") for text in LIMITS["embedded"].notes()),
        _checked("Apache Kafka", kafka, level="note"),
        _checked("java", java, level="note"),
    ]


def _bootstrap(config: Config) -> Finding:
    address = config.kafka.bootstrap
    if address is None:
        return Finding("note", "bootstrap", "kafka.bootstrap is not set: a broker is started for each run")
    host, _, port = address.split(",")[0].rpartition(":")
    if port.isdigit() and accepts(host, int(port)):
        return Finding("ok", "bootstrap", f"{address} accepts connections")
    return Finding("error", "bootstrap", f"nothing answers at {address}")


def _model(config: Config) -> Finding:
    if config.policy.model is None:
        return Finding("note", "model", "policy.model is not set (`headrace demo` makes its own)")
    return _checked("model", lambda: str(check_model_dir(config.policy.model, chat=False)))


def _sandbox(config: Config) -> Finding:
    missing = probe()
    if not missing:
        return Finding("ok", "sandbox", "seccomp, Landlock and limits confine reward functions")
    level: Literal["note", "error"] = "error" if config.verify.sandbox == "require" else "note"
    return Finding(level, "sandbox", "missing for reward functions: " + "; ".join(missing))


def _ports(config: Config) -> list[Finding]:
    def free() -> str:
        return f"loopback works (port {free_port()} was free)"

    findings = [_checked("ports", free)]
    for key, host, port in (
        ("engine.port", config.engine.host, config.engine.port),
        ("metrics.port", config.metrics.host, config.metrics.port),
    ):
        if port:
            findings.append(_checked(key, _port_check(key, host, port)))
    return findings


def _port_check(key: str, host: str, port: int) -> Callable[[], str]:
    def look() -> str:
        require_free_port(port, host=host, what=key, how="choose another, or 0 for a free one")
        return f"{host}:{port} is free"

    return look

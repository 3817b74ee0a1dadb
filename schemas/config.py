"""The configuration tree: its sections, their defaults, and what each key means. It is read by config_file.py.

The larger sections are in config_engine.py, config_streams.py and config_gateway.py; all are imported from here.
Nothing outside entry points reads configuration: constructors get their section.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator

from .config_engine import EngineConfig, SglangConfig, VllmConfig
from .config_gateway import GatewayConfig
from .config_section import Section
from .config_streams import AdvantageConfig, FeedbackConfig, StalenessConfig, StreamsConfig, VerifyConfig
from .topics import checked_name

__all__ = [
    "AdvantageConfig",
    "Config",
    "EngineConfig",
    "FeedbackConfig",
    "GatewayConfig",
    "KafkaConfig",
    "MetricsConfig",
    "PolicyConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "SglangConfig",
    "StalenessConfig",
    "StoreConfig",
    "StreamsConfig",
    "TrainerConfig",
    "VerifyConfig",
    "VllmConfig",
]


class RunConfig(Section):
    namespace: str = "headrace"
    """Prefix of all topic names and consumer groups."""
    dir: Path = Path("runs/default")
    """Where logs, checkpoints, the local blob store and the local broker's data go."""
    seed: int = 0

    @field_validator("namespace")
    @classmethod
    def _name(cls, value: str) -> str:
        return checked_name(value, what="run.namespace")


class KafkaConfig(Section):
    bootstrap: str | None = None
    """host:port[,host:port]; None: `headrace up` starts a broker of its own."""
    broker: Literal["auto", "embedded", "kafka"] = "auto"
    """Which one to start without a bootstrap; auto: Kafka of kafka_home, KAFKA_HOME or `broker fetch`, else embedded."""
    kafka_home: Path | None = None
    """An unpacked Apache Kafka release (its libs/ folder is on the class path)."""
    nodes: Literal[1, 3] = 1
    """How many nodes of Apache Kafka to start; three replicate every topic and survive the loss of any one."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    ssl_cafile: Path | None = None
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    replication_factor: int = -1
    """Of the topics that headrace makes; -1: the broker's own default.replication.factor."""
    static_members: bool = False
    """Give every consumer a static group id: the embedded broker does not expire dead members."""

    @field_validator("replication_factor")
    @classmethod
    def _replicas(cls, value: int) -> int:
        if value != -1 and not 1 <= value <= 32767:
            raise ValueError("use 1 or more, or -1 for the broker's own default")
        return value

    @field_validator("bootstrap")
    @classmethod
    def _addresses(cls, value: str | None) -> str | None:
        if value is None:
            return None
        addresses = [address.strip() for address in value.split(",")]
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ValueError(f"{address!r} is no address: write host:port[,host:port]")
        return ",".join(addresses)


class StoreConfig(Section):
    uri: str | None = None
    """fsspec URI of the folder for blobs; None: <run.dir>/blobs."""
    inline_max_bytes: Annotated[int, Field(ge=1024)] = 512 * 1024
    """A trajectory whose record is larger goes to the blob store."""


class PolicyConfig(Section):
    id: str = "policy"
    model: Path | None = None
    """A Hugging Face model directory (config, weights, tokenizer): version 0."""

    @field_validator("id")
    @classmethod
    def _name(cls, value: str) -> str:
        return checked_name(value, what="policy.id")


class RolloutConfig(Section):
    workers: Annotated[int, Field(ge=0)] = 1
    """Processes that `headrace up` starts."""
    environment: str = "single_turn"
    """Built-in name (`single_turn`, `calculator`) or `module:attr`."""
    environment_args: dict[str, Any] = {}
    environment_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Limit of one call of the environment; a rollout whose call takes longer is aborted."""
    tasks: Path | None = None
    """JSON Lines file; published once to the tasks topic by `headrace up`."""
    group_size: Annotated[int, Field(ge=1)] = 16
    group_seconds: Annotated[float, Field(gt=0)] = 120.0
    """A group closes this long after it was opened, without its missing members."""
    concurrency: Annotated[int, Field(ge=1)] = 256
    """Rollouts in flight in one worker."""
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Limit of one turn."""
    max_turns: Annotated[int, Field(ge=1)] = 16
    max_total_tokens: Annotated[int, Field(ge=1)] = 32768
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    stop: list[str] = []
    """Single-token texts that end a turn, beside the model's end-of-sequence token."""


class TrainerConfig(Section):
    batch_size: Annotated[int, Field(ge=1)] = 256
    """Samples in one optimizer step."""
    steps: Annotated[int, Field(ge=0)] = 0
    """Stop after this version; 0: go on for ever."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    loss: Literal["tis"] = "tis"
    tis_cap: Annotated[float, Field(gt=0)] = 2.0
    """C of truncated importance sampling."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic; the master weights are fp32 and the forward uses their bf16 values either way."""
    micro_batch_tokens: Annotated[int, Field(ge=16)] = 16384
    """Padded tokens in one forward."""
    gradient_checkpointing: bool = False
    anchor_every: Annotated[int, Field(ge=1)] = 20
    checkpoint_every: Annotated[int, Field(ge=1)] = 20
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    second: Literal["fence", "refuse"] = "fence"
    """When another trainer is at work for the policy: take over from it, or end. A supervisor's restart takes over."""
    threads: Annotated[int, Field(ge=1)] = 1
    deterministic: bool = True


class MetricsConfig(Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of this process's /metrics; 0: a free one."""


class Config(Section):
    """The whole tree."""

    run: RunConfig = RunConfig()
    kafka: KafkaConfig = KafkaConfig()
    store: StoreConfig = StoreConfig()
    policy: PolicyConfig = PolicyConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    verify: VerifyConfig = VerifyConfig()
    feedback: FeedbackConfig = FeedbackConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    staleness: StalenessConfig = StalenessConfig()
    trainer: TrainerConfig = TrainerConfig()
    streams: StreamsConfig = StreamsConfig()
    gateway: GatewayConfig = GatewayConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def store_uri(self) -> str:
        """Where blobs go."""
        return self.store.uri or str(self.run.dir / "blobs")

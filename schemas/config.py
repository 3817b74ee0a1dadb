"""The configuration tree: its sections, their defaults, and what each key means. It is read by config_file.py.

Nothing outside entry points reads configuration: constructors get their section.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from .topics import checked_name


class Section(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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


class SglangConfig(Section):
    """Of engine.kind "sglang": how to drive a server that somebody else has started."""

    pause_mode: Literal["in_place", "retract", "abort"] | None = None
    """Requests in flight at an update: `in_place` keeps them and their cache, `retract` computes their cache again,
    `abort` ends them. None: in_place for kv_policy stale, retract for recompute."""
    checkpoint_dir: Path | None = None
    """A folder that the server sees under the same path, with room for the weights; None: one in /dev/shm."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's --api-key."""
    api_key_file: Path | None = None
    """Or a file that holds it."""
    admin_key_env: str | None = None
    """The same for --admin-api-key, where the server has one."""
    admin_key_file: Path | None = None
    stream: bool = False
    """Read tokens as they come: they are counted at once, for more traffic and some 40 ms of every pause."""
    verify_tensors: Annotated[int, Field(ge=0)] = 4
    """Changed tensors whose first rows are read back from the server after each update."""
    control_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Limit of one control call."""
    load_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Limit of the server's load of the weights."""
    watch_seconds: Annotated[float, Field(gt=0)] = 5.0
    """How often the server is asked for its version: a restarted one has old weights and gets ours again."""

    @model_validator(mode="after")
    def _one_source(self) -> SglangConfig:
        for what in ("api_key", "admin_key"):
            if getattr(self, f"{what}_env") is not None and getattr(self, f"{what}_file") is not None:
                raise ValueError(f"set {what}_env or {what}_file, not both")
        return self


class VllmConfig(Section):
    """Of engine.kind "vllm": one in our process, or the server at `engine.url`."""

    pause_mode: Literal["keep", "abort", "drain"] = "keep"
    """Requests in flight at an update: go on after it, end with what they have, or are waited for."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that share the model."""
    handover: Path | None = None
    """Folder in which updates wait for vLLM's workers, which must see it too; None: one in /dev/shm."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the --api-key of the server at `engine.url`."""
    args: dict[str, Any] = {}
    """More of vLLM's own EngineArgs: gpu_memory_utilization, enforce_eager, ..."""


class EngineConfig(Section):
    kind: Literal["transformers", "scripted", "vllm", "sglang"] = "transformers"
    """`sglang` drives the server at `url`; it has been tested against a stub, not on a real SGLang."""
    url: str | None = None
    """http://host:port of the server that an engine of kind `sglang` drives; `vllm`: without it, one in our process."""
    vllm: VllmConfig = VllmConfig()
    sglang: SglangConfig = SglangConfig()
    count: Annotated[int, Field(ge=1)] = 1
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: a free one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic; the published weights are bf16 either way."""
    kv_policy: Literal["recompute", "stale"] = "stale"
    """After an update, requests in flight: prefill again under the new weights, or go on with the old keys and values."""
    max_requests: Annotated[int, Field(ge=1)] = 256
    """Requests decoded at once."""
    max_batch_tokens: Annotated[int, Field(ge=16)] = 1024
    cache_tokens: Annotated[int, Field(ge=256)] = 65536
    """Size of the paged key-value cache."""
    threads: Annotated[int, Field(ge=1)] = 1

    @field_validator("url")
    @classmethod
    def _server(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError(
                "write http://host:port; a key belongs into api_key_env of engine.sglang or engine.vllm"
            )
        return value.rstrip("/")

    @model_validator(mode="after")
    def _one_driver(self) -> EngineConfig:
        if self.url is not None and self.count > 1:
            raise ValueError(
                "engine.count must be 1 with engine.url: several engines would change one server's weights;"
                " run one `headrace engine --id NAME --set engine.url=URL` for each server"
            )
        return self


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


class VerifyConfig(Section):
    reward: str = "exact_match"
    """Built-in name or `module:attr`; a task's own reward spec wins."""
    reward_args: dict[str, Any] = {}
    timeout_seconds: Annotated[float, Field(gt=0)] = 30.0
    failure_reward: float = 0.0
    """What a failed policy gets."""
    concurrency: Annotated[int, Field(ge=1)] = 64
    isolation: Literal["process", "thread"] = "process"
    """Where a user's own reward functions run: in confined processes, or unguarded in the worker's threads."""
    hosts: Annotated[int, Field(ge=1, le=64)] = 2
    """Processes that share `concurrency`."""
    memory_mb: Annotated[int, Field(ge=256)] = 4096
    """Address space of each process; what libraries map counts."""
    allow: list[Literal["network", "write", "processes"]] = []
    """What reward functions may do beyond computing and writing to their own scratch folder."""
    sandbox: Literal["prefer", "require"] = "prefer"
    """require: rollouts are void (sandbox_unavailable) where this machine lacks a layer of the sandbox."""


class FeedbackConfig(Section):
    """Outcomes that come after the rollout (`headrace feedback send`); see streams/feedback_book.py for the rules."""

    enabled: bool = False
    """A score waits for outcomes; naming `signals` switches it on too."""
    signals: list[str] = []
    """Names to wait for; empty: those in `weights`, or without any the signal `reward`."""
    weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """What one unit of a signal adds to the reward; 1 for a signal that is waited for and not named here."""
    reward_weight: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Of the verifier's own reward; 0: the verifier is not asked."""
    settle: Literal["first", "window"] = "first"
    """first: `grace_seconds` after all signals are there; window: at its end, so that later contradictions count."""
    grace_seconds: Annotated[float, Field(ge=0)] = 0.0
    window_seconds: Annotated[float, Field(ge=1, le=6 * 86400)] = 3600.0
    """From the append of the trajectory; below the 7 days for which trajectories are kept. A group of more than one
    stays open, and holds back the commits of its partition, until its last member has settled."""
    default: Annotated[float, Field(allow_inf_nan=False)] | Literal["void"] = "void"
    """When no signal came: what is added in their place, or a void score with the reason `no_feedback`."""

    @property
    def on(self) -> bool:
        """Whether scores wait."""
        return self.enabled or bool(self.signals)

    @property
    def names(self) -> set[str]:
        """The signals that count: those waited for, those with a weight, and `reward`."""
        return {*self.signals, *self.weights, "reward"}

    @property
    def extension_ms(self) -> int:
        """How much later than without feedback a group closes: the window, and an hour for a worker that was away."""
        return int(self.window_seconds * 1000) + 3_600_000 if self.on else 0


class AdvantageConfig(Section):
    estimator: Literal["rloo", "grpo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline", "ema"] = "rloo"
    """reinforce_pp, reinforce_pp_baseline and ema use the last `window` rewards too, so that lone rollouts
    (rollout.group_size 1, traffic) have a signal."""
    window: Annotated[int, Field(ge=1, le=4096)] = 256
    """Rollouts per policy and partition whose rewards make the baseline beyond the group."""
    ema_decay: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Weight of a reward relative to the next newer one."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of later turns' rewards, where the reward is per turn."""
    drop_zero_variance: bool = False
    """Drop the samples of a group whose rewards are all equal, after their advantage is computed."""
    drop_truncated: bool = False
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Drop longer trajectories as over_long, after their advantage is computed."""
    max_tokens_of: Literal["total", "sampled"] = "total"
    """Which tokens max_tokens counts: all, or the sampled ones."""


class StalenessConfig(Section):
    max_lag: Annotated[int, Field(ge=0)] = 4
    """Largest (version being updated) - (oldest version among the trained tokens)."""
    admission_lag: Annotated[int, Field(ge=0)] | None = None
    """The lag that rollouts are admitted for; below max_lag it leaves room for slow ones. None: max_lag."""

    @model_validator(mode="after")
    def _admits_no_stale_ones(self) -> StalenessConfig:
        if self.admission_lag is not None and self.admission_lag > self.max_lag:
            raise ValueError(
                f"admission_lag {self.admission_lag} is above max_lag {self.max_lag}: use at most max_lag"
            )
        return self

    @property
    def admitted_lag(self) -> int:
        """What admission goes by."""
        return self.max_lag if self.admission_lag is None else self.admission_lag


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


class StreamsConfig(Section):
    workers: Annotated[int, Field(ge=1)] = 1
    watchdog_seconds: Annotated[float, Field(gt=0)] = 15.0
    """A worker that owns records to read and moves none for this long ends itself; the supervisor starts a new one."""


class GatewayConfig(Section):
    """The address that agent harnesses are pointed at."""

    enabled: bool = False
    """`headrace up` starts one."""
    host: str = "127.0.0.1"
    """Anything but this machine needs keys_file."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """0: a free one."""
    keys_file: Path | None = None
    """TOML with [[keys]] of sha256, tenant, policy, capture; `headrace gateway --new-key TENANT` makes one. None: no key
    is asked for."""
    models: list[str] = ["claude-*", "gpt-*", "codex-*", "o[0-9]*"]
    """Shell patterns of model names that mean this policy, beside its id: what harnesses send by themselves."""
    thinking: Literal["keep", "branch"] = "keep"
    """A client that replays other reasoning than was sampled: keep the sampled tokens, or open a branch."""
    opening: list[str] = []
    """Markers or text that the generation prompt writes after its header, such as <think> for models that always reason."""
    temperature: Annotated[float, Field(gt=0, le=2)] | None = None
    """Sampled at, whatever clients ask for; None: as they ask. What is sampled at 0 is served and not trained."""
    context_tokens: Annotated[int, Field(ge=16)] | None = None
    """Prompt and answer; None: max_position_embeddings of the model."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Of one answer; None: what the context allows."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    max_messages: Annotated[int, Field(ge=1)] = 4096
    max_in_flight: Annotated[int, Field(ge=1)] = 1024
    """Requests served at once; above it 503."""
    max_rollouts: Annotated[int, Field(ge=1)] = 4096
    """Rollouts open at once; above it new sessions get 503."""
    idle_seconds: Annotated[float, Field(gt=0)] = 900.0
    """A rollout to which nothing happens for so long is finished."""
    keepalive_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Silence after which a stream shows that it lives."""
    patience_seconds: Annotated[float, Field(ge=0)] = 20.0
    """How long a turn waits for an engine that fails or updates, before 503."""
    spool_dir: Path | None = None
    """Finished rollouts lie here until Kafka has them; None: <run.dir>/gateway-spool. One gateway to a folder."""
    spool_mb: Annotated[int, Field(ge=1)] = 1024
    """Above it new sessions get 503."""


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

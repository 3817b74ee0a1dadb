"""A policy's versions as the trainer publishes them: blobs by its emitter, records on a broker, a model directory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trainer_world import tiny_model

from headrace.consumers.trainer.emit import Emitter
from headrace.consumers.trainer.shards import Span, cut
from headrace.schemas import topics as t
from headrace.schemas.config import Config
from headrace.schemas.config_file import dump_config
from headrace.schemas.engine import ENGINE, EngineState, EngineStatus
from headrace.schemas.score import Ref
from headrace.schemas.weights import WEIGHTS, BlobKind, WeightRecord
from headrace.streams.blobs import BlobStore
from headrace.streams.kafka import create_topics, make_producer

POLICY = "policy"


@dataclass(frozen=True)
class Whole:
    """A trainer's float32 weights on one rank."""

    values_of: Mapping[str, np.ndarray]

    @property
    def spans(self) -> Mapping[str, Span]:
        return cut({n: w.shape for n, w in self.values_of.items()}, 0, 1)

    def values(self, name: str) -> np.ndarray:
        return self.values_of[name]


def parameters_of(model: Path) -> dict[str, np.ndarray]:
    """Name -> float32 values, tied ones once."""
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model)
    return {n: p.detach().float().numpy().copy() for n, p in made.named_parameters()}


class WeightsWorld:
    """`store_uri` None: below `folder`. Versions move a hundredth of the elements."""

    def __init__(
        self, kafka: Any, namespace: str, folder: Path, *, anchor_every: int = 4, store_uri: str | None = None
    ) -> None:
        self.folder = folder
        self.model = tiny_model(folder / "model")
        (self.model / "tokenizer.json").write_text('{"a": "tokenizer"}')
        self.config = Config.model_validate(
            {
                "run": {"namespace": namespace, "dir": folder},
                "kafka": kafka.model_dump(),
                "policy": {"id": POLICY, "model": self.model},
                "store": {"uri": store_uri},
            }
        )
        self.topics = t.Topics(namespace)
        create_topics(self.config.kafka, self.topics, [POLICY])
        dump_config(self.config, folder / "config.json")
        self.store = BlobStore(self.config.store_uri)
        self._producer = make_producer(self.config.kafka, client_id="world")
        self.emitter = Emitter(self.store, POLICY, anchor_every=anchor_every, sleep=lambda _: None)
        self.values = parameters_of(self.model)
        self._rng = np.random.default_rng(0)
        self.records: list[WeightRecord] = []
        self.bits: list[dict[str, np.ndarray]] = []

    def encode(self) -> WeightRecord:
        """The next version's record; its blobs are stored, the log does not know it."""
        if self.records:
            for w in self.values.values():
                flat = w.reshape(-1)
                where = self._rng.random(flat.size) < 0.01
                flat[where] *= 1.01
        return self.emitter.encode(Whole(self.values))

    def publish(self, count: int = 1, *, samples: tuple[Ref, ...] = ()) -> None:
        """The next versions, whole."""
        for _ in range(count):
            record = self.encode()
            if samples:
                from headrace.consumers.trainer.sample_list import encode_refs

                listed = self.emitter.put(BlobKind.SAMPLES, record.version, encode_refs(samples))
                record = WeightRecord(**{**fields(record), "blobs": (*record.blobs, listed)})
            self.announce(record)

    def announce(self, record: WeightRecord) -> None:
        self.emitter.settle()
        topic = self.topics.name(t.WEIGHTS, POLICY)
        value = WEIGHTS.encode(record)
        self._producer.send(
            topic, value, key=POLICY.encode(), headers=[("schema", WEIGHTS.tag.encode())]
        ).get(30)
        self.records.append(record)
        self.bits.append({n: b.copy() for n, b in self.emitter._bits.items()})

    def engine(self, version: int, *, age_s: float = 0.0, state: EngineState = EngineState.IDLE) -> None:
        """An engine says that it serves `version`."""
        status = EngineStatus(
            engine_id=f"engine-{version}",
            policy_id=POLICY,
            state=state,
            version=version,
            latest_version=len(self.records) - 1,
            at_ms=int((time.time() - age_s) * 1000),
        )
        headers = [("schema", ENGINE.tag.encode())]
        sent = self._producer.send(
            self.topics.name(t.ENGINES), ENGINE.encode(status), key=status.engine_id.encode(), headers=headers
        )
        sent.get(30)

    def blobs(self) -> list[str]:
        return self.store.names(f"weights/{POLICY}")

    def close(self) -> None:
        self._producer.close()


def fields(record: WeightRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}

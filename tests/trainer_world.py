"""Trajectories and samples on a broker, as the stages before the trainer would have written them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.schemas import topics as t
from headrace.schemas.config import Config
from headrace.schemas.config_file import dump_config
from headrace.schemas.sample import SAMPLE, Fate, Sample, sample_headers
from headrace.schemas.score import Ref
from headrace.schemas.trajectory import TRAJECTORY, Split, Trajectory, Turn, VersionSpan
from headrace.schemas.weights import WEIGHTS, WeightRecord
from headrace.streams.kafka import (
    closing,
    create_topics,
    make_consumer,
    make_producer,
    partitions_of,
    poll_records,
)

POLICY = "policy"
VOCAB = 17


def tiny_model(directory: Path, seed: int = 0) -> Path:
    """A Hugging Face directory with a model of 1 layer, loadable offline."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def make_trajectory(rng: np.random.Generator, name: str, version: int = 0) -> Trajectory:
    """Two turns with an environment's tokens in between; ids and logprobs at random."""
    prompt, first, middle, second = (int(rng.integers(1, 5)) for _ in range(4))
    n = prompt + first + middle + second
    mask = np.zeros(n, dtype=bool)
    turns = [(prompt, prompt + first), (n - second, n)]
    for start, end in turns:
        mask[start:end] = True
    return Trajectory(
        trajectory_id=name,
        rollout_id=name,
        group_id=f"g-{name}",
        group_size=1,
        group_deadline_ms=0,
        task_id="task",
        policy_id=POLICY,
        token_ids=rng.integers(0, VOCAB, n, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.uniform(1.0, 4.0, n), 0.0).astype(np.float32),
        version_spans=tuple(VersionSpan(version, s, e) for s, e in turns),
        turns=tuple(Turn(start=s, end=e, finish_reason="stop") for s, e in turns),
        vocab_size=VOCAB,
    )


def make_sample(
    trajectory: Trajectory,
    ref: Ref,
    *,
    advantage: float = 1.0,
    reason: str | None = None,
    version: int | None = None,
) -> Sample:
    """Admitted with `advantage`, or dropped for `reason`."""
    return Sample(
        trajectory_id=trajectory.trajectory_id,
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        task_id=trajectory.task_id,
        policy_id=POLICY,
        split=Split.TRAIN,
        fate=Fate.ADMITTED if reason is None else Fate.DROPPED,
        reason=reason,
        reward=1.0 if advantage > 0 else 0.0,
        advantage=advantage,
        version_min=trajectory.version_min if version is None else version,
        version_max=trajectory.version_max if version is None else version,
        total_tokens=len(trajectory.token_ids),
        sampled_tokens=trajectory.sampled_tokens,
        truncated=False,
        ref=ref,
    )


class World:
    """A namespace on a broker, a model, and the trainer's configuration."""

    def __init__(self, kafka: Any, namespace: str, folder: Path, **trainer: Any) -> None:
        self.topics = t.Topics(namespace)
        settings = {"batch_size": 8, "lr": 1e-3, "warmup_steps": 2, "anchor_every": 4, "checkpoint_every": 3}
        self.config = Config.model_validate(
            {
                "run": {"namespace": namespace, "dir": folder},
                "kafka": kafka.model_dump(),
                "policy": {"id": POLICY, "model": tiny_model(folder / "model")},
                "staleness": {"max_lag": 1000},
                "trainer": settings | trainer,
            }
        )
        create_topics(self.config.kafka, self.topics, [POLICY])
        self.producer = make_producer(self.config.kafka, client_id="world")
        self._made = 0

    def trajectories(self, count: int) -> list[tuple[Trajectory, Ref]]:
        """Publish new ones; where they lie."""
        numbers = range(self._made, self._made + count)
        made = [make_trajectory(np.random.default_rng(i), f"t{i}") for i in numbers]
        self._made += count
        sent = [
            self.producer.send(
                self.topics.name(t.TRAJECTORIES), TRAJECTORY.encode(m), key=m.rollout_id.encode(), headers=[]
            )
            for m in made
        ]
        metadata = [future.get(timeout=30) for future in sent]
        return [(m, Ref(d.partition, d.offset)) for m, d in zip(made, metadata, strict=True)]

    def samples(self, samples: Sequence[Sample], *, partition: int | None = None) -> None:
        """Publish sample records, to one partition where their order matters."""
        topic = self.topics.name(t.SAMPLES, POLICY)
        for s in samples:
            value, key = SAMPLE.encode(s), s.group_id.encode()
            self.producer.send(topic, value, key=key, headers=sample_headers(s), partition=partition)
        self.producer.flush()

    def feed(self, count: int, *, partition: int | None = None) -> list[Sample]:
        """Publish `count` trajectories, each with an admitted sample."""
        made = [
            make_sample(trajectory, ref, advantage=float(trajectory.logprobs.sum()) % 2.0 - 1.0)
            for trajectory, ref in self.trajectories(count)
        ]
        self.samples(made, partition=partition)
        return made

    def versions(self) -> list[WeightRecord]:
        """Every committed weight record."""
        return [WEIGHTS.decode(r.value, r.headers) for r in self.read(self.topics.name(t.WEIGHTS, POLICY))]

    def read(self, topic: str) -> list[Any]:
        """Every committed record of a topic."""
        with closing(make_consumer(self.config.kafka, client_id="reader")) as consumer:
            partitions = partitions_of(consumer, topic)
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)
            ends = consumer.end_offsets(partitions)
            found: list[Any] = []
            while any(consumer.position(p) < ends[p] for p in partitions):
                found += poll_records(consumer, idle_seconds=0.005)
            return found

    def committed(self) -> dict[int, int]:
        """Partition -> committed offset of the trainer's group."""
        group = self.topics.group("trainer", POLICY)
        with closing(make_consumer(self.config.kafka, client_id="offsets", group_id=group)) as consumer:
            partitions = partitions_of(consumer, self.topics.name(t.SAMPLES, POLICY))
            consumer.assign(partitions)
            return {p.partition: consumer.committed(p) for p in partitions}

    def await_version(self, version: int, trainer: subprocess.Popen[str], timeout_s: float = 90.0) -> None:
        """Until `version` is in the log; fails when the trainer ends before."""
        deadline = time.monotonic() + timeout_s
        with closing(make_consumer(self.config.kafka, client_id="waiter")) as consumer:
            consumer.assign(partitions_of(consumer, self.topics.name(t.WEIGHTS, POLICY)))
            seen = -1
            while seen < version:
                ended = trainer.poll() is not None
                records = poll_records(consumer)
                seen = max([seen, *(WEIGHTS.decode(r.value, r.headers).version for r in records)])
                assert records or not ended, f"ended with {trainer.returncode}: {trainer.communicate()[1]}"
                assert time.monotonic() < deadline, f"version {version} did not come, only {seen}"

    def start(self, ranks: int = 1, **changes: Any) -> subprocess.Popen[str]:
        """A trainer process, or torchrun with `ranks` of them; `changes` to its section of the configuration."""
        trainer = self.config.trainer.model_copy(update=changes)
        path = self.config.run.dir / "config.json"
        dump_config(self.config.model_copy(update={"trainer": trainer}), path)
        code = (
            "import sys, logging; from pathlib import Path; from headrace.schemas.config_file import load_config;"
            "logging.basicConfig(level='INFO'); logging.getLogger('kafka').setLevel('WARNING');"
            "from headrace.consumers.trainer.role import main; sys.exit(main(load_config(Path(sys.argv[1]))))"
        )
        command = [sys.executable, "-c", code, str(path)]
        if ranks > 1:
            script = self.config.run.dir / "train.py"
            script.write_text(code)
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--local-addr=127.0.0.1",
            ]
            command += [f"--nproc-per-node={ranks}", str(script), str(path)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def run(self, ranks: int = 1, **changes: Any) -> str:
        """A trainer process to its end; what it logged. Fails unless it ends with status 0."""
        process = self.start(ranks, **changes)
        _, log = process.communicate(timeout=120)
        assert process.returncode == 0, log
        return log


def terminate(process: subprocess.Popen[str]) -> str:
    """SIGTERM; the rest of its log."""
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    return log

"""What the tests of following share: a trainer's records and blobs, a clock that a test moves, and one subscriber."""

import io

import numpy as np

from headrace.producers.engines.follower import Follower, FollowRule
from headrace.producers.engines.pauses import Pauses
from headrace.producers.engines.scripted import ScriptedEngine
from headrace.producers.engines.subscriber import WeightSubscriber
from headrace.schemas.anchor import write_anchor
from headrace.schemas.delta import Change, encode_anchor, encode_delta, write_delta
from headrace.schemas.weight_hash import set_hash, tensor_hashes
from headrace.schemas.weights import BlobKind, WeightBlob, WeightRecord
from headrace.streams.blobs import memory_store


class Trainer:
    """Makes weight records and blobs as a trainer of `shards` ranks does; an anchor every `anchor_every` versions."""

    def __init__(self, anchor_every: int = 1000, *, shards: int = 1) -> None:
        self.store = memory_store()
        self.anchor_every, self.shards, self.prefix = anchor_every, shards, "weights"
        # An anchor is the larger blob, as in life: `bulk` never changes.
        bulk = np.random.default_rng(0).integers(0, 2**16, 4000).astype(np.uint16)
        first = {"a": np.arange(60, dtype=np.uint16).reshape(6, 10), "b": np.ones(5, np.uint16), "bulk": bulk}
        self.weights = [first]
        self.records = [self._record(0, None, None)]

    def step(self, *, empty: bool = False, also: str | None = None) -> WeightRecord:
        base, version = self.weights[-1], len(self.weights)
        new = {name: bits.copy() for name, bits in base.items()}
        if not empty:
            new["a"].reshape(-1)[[version % 60, (version * 7 + 1) % 60]] += 5
        if also is not None:
            new[also].reshape(-1)[version % 5] += 1
        self.weights.append(new)
        self.records.append(self._record(version, base, new))
        return self.records[-1]

    def steps(self, n: int) -> list[WeightRecord]:
        return [self.step() for _ in range(n)]

    def hash(self, version: int) -> int:
        return set_hash(self.weights[version])

    def tensor_hashes(self, version: int) -> dict[str, int]:
        return tensor_hashes(self.weights[version])

    def overwrite(self, record: WeightRecord, kind: BlobKind, data: bytes, shard: int = 0) -> None:
        """The blob's bytes as they stand in the store; its record stays."""
        self.store.put(record.blobs_of(kind)[shard].uri, data)

    def restore(self, version: int, kind: BlobKind) -> None:
        self._blob(version, kind, self._delta(version) if kind is BlobKind.DELTA else self._anchor(version))

    def _delta(self, version: int) -> bytes:
        base, new = self.weights[version - 1], self.weights[version]
        return encode_delta(base, new, base_version=version - 1, version=version).blob

    def _delta_shards(self, version: int) -> list[bytes]:
        """Each rank's delta of its run of every flat tensor."""
        return [self._delta_shard(version, shard) for shard in range(self.shards)]

    def _delta_shard(self, version: int, shard: int) -> bytes:
        changes = []
        for name, old in self.weights[version - 1].items():
            new, size = self.weights[version][name].reshape(-1), old.size
            begin, end = (size * i // self.shards for i in (shard, shard + 1))
            changes.append(
                Change(
                    name=name,
                    old=old.reshape(-1)[begin:end],
                    new=new[begin:end],
                    shape=old.shape,
                    flat_offset=begin,
                )
            )
        sink = io.BytesIO()
        write_delta(sink, changes, base_version=version - 1, version=version, shard=shard, shards=self.shards)
        return sink.getvalue()

    def _anchor(self, version: int) -> bytes:
        return encode_anchor(self.weights[version], version)

    def _anchor_shards(self, version: int) -> list[bytes]:
        return [self._anchor_shard(version, shard) for shard in range(self.shards)]

    def _anchor_shard(self, version: int, shard: int) -> bytes:
        parts, places = {}, {}
        for name, bits in self.weights[version].items():
            begin, end = (bits.size * i // self.shards for i in (shard, shard + 1))
            parts[name] = bits.reshape(-1)[begin:end]
            places[name] = (bits.shape, begin)
        sink = io.BytesIO()
        write_anchor(sink, parts, version, self.hash(version), places=places)
        return sink.getvalue()

    def _blob(self, version: int, kind: BlobKind, data: bytes, shard: int = 0, shards: int = 1) -> WeightBlob:
        name = f"{self.prefix}/{version}-{kind}" + (f"-{shard}" if shards > 1 else "")
        ref = self.store.put(name, data)
        return WeightBlob(
            kind=kind, uri=ref.name, size=ref.size, sha256=ref.sha256, shard=shard, shards=shards
        )

    def _record(self, version, base, new) -> WeightRecord:
        blobs = []
        if base is not None:
            parts = [self._delta(version)] if self.shards == 1 else self._delta_shards(version)
            for shard, data in enumerate(parts):
                blobs.append(self._blob(version, BlobKind.DELTA, data, shard, self.shards))
        if version % self.anchor_every == 0:
            parts = [self._anchor(version)] if self.shards == 1 else self._anchor_shards(version)
            for shard, data in enumerate(parts):
                blobs.append(self._blob(version, BlobKind.ANCHOR, data, shard, self.shards))
        return WeightRecord(
            policy_id="p",
            version=version,
            base_version=None if base is None else version - 1,
            base_hash=None if base is None else set_hash(base),
            weights_hash=set_hash(self.weights[version]),
            blobs=tuple(blobs),
        )


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Setup:
    """A subscriber on a scripted engine, and everything that it published."""

    def __init__(
        self, trainer: Trainer, engine: ScriptedEngine | None = None, pauses: Pauses | None = None, **rule
    ) -> None:
        self.trainer, self.clock = trainer, Clock()
        self.engine = engine if engine is not None else ScriptedEngine()
        self.statuses = []
        self.subscriber = WeightSubscriber(
            self.engine,
            trainer.store,
            engine_id="e",
            policy_id="p",
            publish=self.statuses.append,
            follower=Follower(FollowRule(**rule)),
            pauses=pauses,
            clock=self.clock,
        )

    def see(self, *records: WeightRecord) -> None:
        self.subscriber.see(records)
        self.settle()

    def settle(self) -> None:
        for _ in range(50):
            if not self.subscriber.follow():
                return
        raise AssertionError("it never comes to rest")

    @property
    def last(self):
        return self.statuses[-1]

    def check_live(self, version: int) -> None:
        assert self.engine.version == self.subscriber.version == version
        assert self.engine.weights_hash() == self.trainer.hash(version)
        assert self.last.weights_hash == self.trainer.hash(version)

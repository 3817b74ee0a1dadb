"""What there is of a policy's weights: the records of the log, the blobs in the store, the engines that follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..schemas.config import Config
from ..schemas.engine import ENGINE, EngineStatus
from ..schemas.errors import BrokerError, ConfigError, InvalidMessageError
from ..schemas.topics import ENGINES, WEIGHTS, Topics
from ..schemas.weights import WEIGHTS as WEIGHT_RECORD
from ..schemas.weights import BlobKind, WeightRecord
from ..streams.blobs import BlobStore
from ..streams.compacts import find_jumps
from ..streams.kafka import closing, make_consumer, partitions_of, poll_records

SILENT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Catalog:
    """The versions of one policy, and what of them is in the store."""

    records: Mapping[int, WeightRecord]
    """Version -> record, without its samples; where two records have one version the first counts."""
    present: Mapping[str, int]
    """Name -> bytes of every blob in the folders that the records name."""
    unreadable: int = 0
    """Records of the topic that could not be decoded."""
    jumps: tuple[WeightRecord, ...] = ()
    """Compacted deltas, as records whose base is further down: streams/compacts.py."""

    @property
    def newest(self) -> int:
        """-1 without any."""
        return max(self.records, default=-1)

    def missing(self, record: WeightRecord) -> list[str]:
        """Names of its blobs that are not in the store, or not with the size that the record says."""
        return [b.uri for b in record.blobs if self.present.get(b.uri) != b.size]

    def has(self, record: WeightRecord, kind: BlobKind) -> bool:
        """Whether every shard of one kind is in the store."""
        blobs = record.blobs_of(kind)
        return bool(blobs) and all(self.present.get(b.uri) == b.size for b in blobs)

    def chain(self, version: int) -> list[WeightRecord]:
        """From the newest anchor that `version` can be reached from, by as few blobs as possible. ConfigError."""
        if version not in self.records:
            raise ConfigError(f"version {version} is not in the log" + self._reachable(version))
        lacks = "an anchor at or below it"
        for start in (v for v in sorted(self.records, reverse=True) if v <= version):
            if not self.has(self.records[start], BlobKind.ANCHOR):
                continue
            chain = [self.records[start]]
            while chain[-1].version < version and (on := self._step(chain[-1].version, version)) is not None:
                chain.append(on)
            if chain[-1].version == version:
                return chain
            lacks = f"the delta of version {chain[-1].version + 1}"
        raise ConfigError(
            f"version {version} cannot be put together: {lacks} is not in the store"
            + self._reachable(version)
        )

    def _step(self, version: int, last: int) -> WeightRecord | None:
        """The furthest step up from `version`, not beyond `last`."""
        steps = [j for j in self.jumps if j.base_version == version and j.version <= last]
        following = self.records.get(version + 1)
        if following is not None and self.has(following, BlobKind.DELTA):
            steps.append(following)
        return max(steps, key=lambda r: r.version, default=None)

    def _reachable(self, version: int) -> str:
        anchors = [v for v, r in self.records.items() if v > version and self.has(r, BlobKind.ANCHOR)]
        if not anchors:
            return "; `headrace weights ls` shows what is there"
        return f"; the next that can is version {min(anchors)} (`headrace weights ls` shows all)"


def read_catalog(config: Config, store: BlobStore) -> Catalog:
    """The weights topic up to its end, and listings of the store. Raises BrokerError, BlobError, ConfigError."""
    topic = Topics(config.run.namespace).name(WEIGHTS, config.policy.id)
    records: dict[int, WeightRecord] = {}
    unreadable = 0
    for raw in read_topic(config, topic):
        try:
            record = WEIGHT_RECORD.decode(raw.value, raw.headers)
        except InvalidMessageError:
            unreadable += 1
            continue
        # Thousands of versions with thousands of samples each would fill the memory.
        records.setdefault(record.version, _light(record))
    if not records:
        raise ConfigError(
            f"{topic} has no version: has the trainer of policy {config.policy.id!r} started? Another policy or run: "
            "--set policy.id=..., --run-dir"
        )
    present = list_blobs(store, records.values())
    return Catalog(dict(sorted(records.items())), present, unreadable, find_jumps(store, records))


def list_blobs(store: BlobStore, records: Iterable[WeightRecord]) -> dict[str, int]:
    """Name -> bytes in every folder that the records name. Raises BlobError."""
    return {name: size for folder in folders(records) for name, size in store.sizes(folder).items()}


def folders(records: Iterable[WeightRecord]) -> list[str]:
    """Where the blobs of `records` lie."""
    return sorted({b.uri.rpartition("/")[0] for r in records for b in r.blobs})


def read_engines(config: Config, now_s: Callable[[], float] = time.time) -> list[tuple[EngineStatus, float]]:
    """Each engine's newest status and its age in seconds. Raises BrokerError."""
    newest: dict[str, EngineStatus] = {}
    for raw in read_topic(config, Topics(config.run.namespace).name(ENGINES)):
        if raw.value is None:
            continue
        try:
            status = ENGINE.decode(raw.value, raw.headers)
        except InvalidMessageError as e:
            # Of an engine that nothing is known about, everything may be needed.
            raise ConfigError(
                f"the status of engine {(raw.key or b'').decode(errors='replace')} cannot be read ({e}): is it a newer "
                "headrace? Use the same version here"
            ) from None
        newest[status.engine_id] = status
    return [(s, now_s() - s.at_ms / 1000) for s in newest.values()]


def read_topic(config: Config, topic: str) -> Iterator[Any]:
    """Every committed record up to the present end. Raises BrokerError."""
    with closing(make_consumer(config.kafka, client_id="headrace-weights")) as consumer:
        partitions = partitions_of(consumer, topic)
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        ends = consumer.end_offsets(partitions)
        heard = time.monotonic()
        while any(consumer.position(p) < ends[p] for p in partitions):
            for record in poll_records(consumer, idle_seconds=0.005):
                heard = time.monotonic()
                yield record
            # The last offsets may be a transaction's markers, which no read returns.
            if time.monotonic() - heard > SILENT_SECONDS:
                if all(ends[p] - consumer.position(p) <= 1 for p in partitions):
                    return
                raise BrokerError(f"{topic} could not be read to its end: is the broker well?")


def _light(record: WeightRecord) -> WeightRecord:
    return replace(record, samples=(), consumed=(), metrics={**record.metrics, "samples": record.trained})

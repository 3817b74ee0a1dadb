"""Where a trainer goes on: the newest checkpoint that the log agrees with, then every later step redone from the log.

    log empty                     version 0, published as an anchor
    checkpoint c = newest L       go on
    checkpoint c < L              redo c+1..L from the recorded samples, each weights hash checked
    no checkpoint                 the log's weights at L, a fresh optimizer, a loud warning
    a step cannot be redone       the log's weights at L, published again as an anchor L+1

A trainer that comes back is fenced in first (its transactions are initialised), so the log no longer moves.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...schemas.config import TrainerConfig
from ...schemas.errors import BlobCorruptError, BlobNotFoundError, InvalidMessageError
from ...schemas.sample import SAMPLE, Sample
from ...schemas.weights import WeightRecord
from ...streams.blobs import BlobStore
from .batch import Row
from .checkpoint import CheckpointInfo, Checkpoints
from .history import History, load_bits
from .orders import Order, encode_records, tell
from .payloads import Payloads
from .refs import RefReader
from .sample_list import samples_of
from .step import Learner

logger = logging.getLogger(__name__)

_ARITHMETIC = (
    "lr",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "warmup_steps",
    "grad_clip",
    "loss",
    "tis_cap",
    "entropy_coef",
    "dtype",
    "micro_batch_tokens",
    "gradient_checkpointing",
    "threads",
)


class RedoError(Exception):
    """A step of the log cannot be redone bit for bit here; says why."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where the learner stands."""

    exact: bool
    """False: the weights are the log's, but the digits below bf16 or the optimizer are not those that made them."""
    reanchor: bool
    """True: publish the weights again as an anchor before the next step."""


def config_hash(config: TrainerConfig, ranks: int = 1) -> str:
    """16 hex digits over what decides a step's arithmetic: settings, version of torch, number of ranks."""
    settings = {name: getattr(config, name) for name in _ARITHMETIC} | {"torch": torch.__version__}
    if ranks > 1:
        settings["ranks"] = ranks
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def usable(infos: Sequence[CheckpointInfo], history: History) -> list[CheckpointInfo]:
    """The checkpoints whose version is in the log with the same weights, in the order given."""
    found = []
    for info in infos:
        record = history.get(info.version)
        if record is not None and record.weights_hash == info.weights_hash:
            found.append(info)
        else:
            logger.info("checkpoint of version %d is not of this log", info.version)
    return found


class Redo:
    """Redoes recorded steps."""

    def __init__(self, samples: RefReader, payloads: Payloads, store: BlobStore) -> None:
        """`samples`: reads the samples topic."""
        self._samples, self._payloads, self._store = samples, payloads, store

    def step(self, learner: Learner, record: WeightRecord, settings: str) -> None:
        """Make `record`'s version again. RedoError unless the weights come out the same."""
        if not record.trained:
            raise RedoError(f"version {record.version} was not made by a step")
        if record.config_hash != settings:
            raise RedoError(f"version {record.version} was made with other settings")
        result = learner.step(self._rows(record))
        found = learner.weights_hash()
        if found != record.weights_hash:
            raise RedoError(
                f"version {result.version} came out with hash {found:016x}, the log says {record.weights_hash:016x}: "
                "this machine does not compute the same bits"
            )

    def _rows(self, record: WeightRecord) -> list[Row]:
        try:
            refs = samples_of(record, self._store)
        except (BlobCorruptError, BlobNotFoundError, InvalidMessageError) as e:
            raise RedoError(f"the list of samples of version {record.version} is gone: {e}") from e
        raw = self._samples.fetch(refs)
        samples: list[Sample] = []
        try:
            for ref in refs:
                samples.append(SAMPLE.decode(raw[ref].value, raw[ref].headers))
        except (KeyError, InvalidMessageError) as e:
            raise RedoError(f"a sample of version {record.version} is gone: {e}") from e
        rows = self._payloads.rows(samples)
        if any(row is None for row in rows):
            raise RedoError(f"a payload of version {record.version} is gone")
        return [row for row in rows if row is not None]


def resume(
    learner: Learner, history: History, checkpoints: Checkpoints, redo: Redo, store: BlobStore, settings: str
) -> Resumed:
    """Bring `learner` to the newest version of a log that is not empty.

    Raises WeightUpdateError or BlobError when the log's weights are needed and cannot be had.
    """
    newest = history.newest
    assert newest is not None
    infos = checkpoints.infos()
    ours = usable(infos, history)
    checkpoints.set_aside([info for info in infos if info not in ours])
    loaded = _load(learner, ours, checkpoints)
    if loaded:
        try:
            for version in range(learner.version + 1, newest.version + 1):
                record = history.get(version)
                if record is None:
                    raise RedoError(f"version {version} is not in the log")
                redo.step(learner, record, settings)
                logger.info("step redone from the log version=%d", version)
            return Resumed(exact=True, reanchor=False)
        except RedoError as e:
            logger.error("the log's steps cannot be redone: %s; going on from its weights", e)
    else:
        logger.warning(
            "NO CHECKPOINT for the %d versions in the log: taking the weights of version %d from the log, with a "
            "fresh optimizer",
            newest.version + 1,
            newest.version,
        )
    replaced = adopt(learner, history.chain(newest.version), store)
    logger.warning("weights taken from the log version=%d elements_replaced=%d", newest.version, replaced)
    return Resumed(exact=False, reanchor=loaded)


def adopt(learner: Learner, chain: Sequence[WeightRecord], store: BlobStore) -> int:
    """Take the weights of the last of `chain` (an anchor and the deltas after it); how many elements it replaced here.

    Called on all ranks alike. Raises WeightUpdateError or BlobError.
    """
    tell(learner.team, Order.ADOPT, lambda: encode_records(chain))
    return learner.adopt(load_bits(chain, store, learner.shapes), chain[-1].version)


def _load(learner: Learner, infos: Sequence[CheckpointInfo], checkpoints: Checkpoints) -> bool:
    """Load the first that is whole; False if there is none."""
    for info in infos:
        try:
            learner.load(checkpoints.load(info), info.version)
            return True
        except (KeyError, ValueError) as e:
            logger.warning("checkpoint of version %d is broken: %s", info.version, e)
    return False

"""Every rank but 0: do what rank 0 does, when it says so. See orders.py."""

from __future__ import annotations

import logging

from ...schemas.errors import HeadraceError
from ...streams.blobs import BlobStore
from .checkpoint import Checkpoints, info_of
from .emit import Emitter
from .orders import Order, decode_records, decode_rows, hear
from .resume import adopt
from .step import Learner

logger = logging.getLogger(__name__)


def follow(learner: Learner, emitter: Emitter, checkpoints: Checkpoints, store: BlobStore) -> None:
    """Carry out orders until the one to stop. TeamError when rank 0 is gone.

    What fails here has failed on rank 0 too (`team.together`), which decides what comes of it.
    """
    while True:
        order, body = hear(learner.team)
        if order is Order.STOP:
            return
        try:
            _carry_out(order, body, learner, emitter, checkpoints, store)
        except (HeadraceError, OSError, ValueError, KeyError) as e:
            logger.error("order %s not carried out by rank %d: %s", order, learner.team.rank, e)


def _carry_out(
    order: Order,
    body: bytes,
    learner: Learner,
    emitter: Emitter,
    checkpoints: Checkpoints,
    store: BlobStore,
) -> None:
    match order:
        case Order.STEP:
            learner.step(decode_rows(body))
        case Order.HASH:
            learner.weights_hash()
        case Order.ADOPT:
            adopt(learner, decode_records(body), store)
        case Order.STAND:
            emitter.stand_at(int(body), learner.master)
        case Order.ENCODE:
            learner.version = emitter.encode(learner.master, anchor=body == b"anchor").version
        case Order.SETTLE:
            emitter.settle()
        case Order.SAVE:
            checkpoints.save(info_of(body), learner.tensors())
        case Order.LOAD:
            info = info_of(body)
            learner.load(checkpoints.load(info), info.version)
        case Order.STOP:
            raise AssertionError("handled by the caller")

"""What runs inside each of vLLM's workers: `--worker-extension-cls headrace.producers.engines.vllm.worker.WorkerExtension`.

Importing it registers the weight-transfer engine `headrace`, and keeps the CPU backend's weights unpacked. Arguments
are strings and results plain trees, so that the methods can be called over HTTP (/collective_rpc) as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from ....schemas.errors import WeightUpdateError
from . import cpu
from .describe import check_loadable, layers_of, parameters_of
from .handover import read_update
from .live import LiveShard, Prepared
from .proof import check_against_files
from .shards import box_hash

logger = logging.getLogger(__name__)

BACKEND = "headrace"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: who sends is whoever may write the files."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which of the updates that were staged."""

    version: int


class HeadraceWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Writes what was staged, in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        cpu.check_unpacked(model)
        layers, unknown = layers_of(model)
        self.shard = LiveShard(parameters_of(model), layers, dict(cpu.repackers(model)))
        unknown += check_against_files(self.shard, Path(vllm_config.model_config.model))
        if unknown:
            check_loadable(model, unknown)
            self.shard.load = model.load_weights
        self.by_loader = unknown
        self.staged: dict[int, tuple[str, Prepared]] = {}
        """Version -> digest of its file, and what was made of it."""
        self.written: tuple[str, Prepared] | None = None
        self.failure: list[str] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Writing in place needs no preparation."""

    def finish_weight_update(self) -> None:
        """Nor an end."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Write a staged update; the base class would ask for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Write a staged update; `failure` says what went wrong.

        Nothing is raised: with several ranks vLLM would take the others' errors for the answers to later calls.
        """
        self.failure = _outcome(lambda: self._receive(update_info))

    def _receive(self, update_info: UpdateInfo) -> None:
        version = int(update_info.version)
        if version not in self.staged:
            raise WeightUpdateError("handover", f"version {version} was not staged")
        self.written = self.staged.pop(version)
        self.shard.write(self.written[1])
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Nothing is open."""


class WorkerExtension:
    """Methods that vLLM's worker class gains."""

    weight_transfer_engine: Any

    def headrace_hello(self) -> dict[str, Any]:
        """What this rank is; raises where the engine was not started for headrace."""
        engine = _engine(self)
        model = engine.vllm_config.model_config
        return {
            "vocab_size": model.get_vocab_size(),
            "context": model.max_model_len,
            "logprobs_mode": str(model.logprobs_mode),
            "by_loader": engine.by_loader,
        }

    def headrace_stage(self, path: str, digest: str) -> dict[str, Any]:
        """Begin to check the update in `path`; `headrace_done` tells the outcome."""
        engine = _engine(self)

        def stage() -> None:
            update = read_update(Path(path), digest)
            engine.staged = {update.version: (digest, engine.shard.prepare(update))}

        return self._headrace_begin(stage)

    def headrace_verify(self, path: str, digest: str) -> dict[str, Any]:
        """Begin to compare the live weights with the update in `path`; `headrace_done` tells the outcome."""
        engine = _engine(self)
        if engine.written is not None and engine.written[0] == digest:
            # Nobody asks twice, and its file takes memory for as long as it is mapped.
            prepared, engine.written = engine.written[1], None
            return self._headrace_begin(lambda: engine.shard.verify_written(prepared))
        return self._headrace_begin(lambda: engine.shard.verify(read_update(Path(path), digest)))

    def headrace_done(self) -> dict[str, Any]:
        """{"done": bool} and, once it is, {"error": [reason, detail] | None} of what was begun."""
        begun: Future[None] = self._headrace_begun
        if not begun.done():
            return {"done": False}
        return {"done": True, "error": _outcome(begun.result)}

    def headrace_unstage(self) -> dict[str, Any]:
        """Forget what was staged and not written."""
        engine = _engine(self)
        engine.staged, engine.written = {}, None
        return {}

    def headrace_fits(self, version: str) -> dict[str, Any]:
        """Whether a staged update goes on top of what is live."""
        engine = _engine(self)
        if int(version) not in engine.staged:
            return {"error": ["handover", f"version {version} was not staged"]}
        update = engine.staged[int(version)][1].update
        return {"error": _outcome(lambda: engine.shard.check_base(update))}

    def headrace_wrote(self) -> dict[str, Any]:
        """How the last write ended: {"error": [reason, detail] | None}."""
        return {"error": _engine(self).failure}

    def headrace_hashes(self) -> dict[str, Any]:
        """Every tensor of the policy: its shape, format, and the hash of each box of it that this rank holds."""
        shard = _engine(self).shard
        if shard.torn:
            return {"error": ["torn", "the weights are torn"], "tensors": []}
        tensors: list[Any] = []
        error = _outcome(lambda: tensors.extend(_hashed(shard)))
        return {"error": error, "tensors": tensors}

    def headrace_advance(self, version: str) -> dict[str, Any]:
        """The same weights under another version."""
        _engine(self).shard.version = int(version)
        return {}

    def _headrace_begin(self, work: Callable[[], None]) -> dict[str, Any]:
        if not hasattr(self, "_headrace_pool"):
            self._headrace_pool = ThreadPoolExecutor(1, thread_name_prefix="headrace")
        self._headrace_begun = self._headrace_pool.submit(work)
        return {}


def _hashed(shard: LiveShard) -> Any:
    for name, (shape, dtype) in shard.known.items():
        boxes = [
            [b.low, b.high, str(box_hash(shape, b.low, b.high, bits, dtype))] for b, bits in shard.read(name)
        ]
        yield [name, shape, dtype.value, boxes]


def _engine(worker: Any) -> HeadraceWeights:
    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, HeadraceWeights):
        raise RuntimeError(
            'vLLM was started without the weight transfer of headrace: add --weight-transfer-config \'{"backend": "headrace"}\''
        )
    return engine


def _outcome(call: Any) -> list[str] | None:
    """None, or the reason and the detail of a refusal."""
    try:
        call()
    except WeightUpdateError as e:
        return [e.reason, e.detail]
    except Exception as e:
        logger.exception("headrace: failed in a worker")
        return ["failed", f"{type(e).__name__}: {e}"]
    return None


cpu.keep_unpacked()
WeightTransferEngineFactory.register_engine(BACKEND, HeadraceWeights)

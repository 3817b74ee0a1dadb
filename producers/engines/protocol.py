"""What every engine is: it samples from token ids, and its weights can be replaced between two tokens.

`generate` runs on an asyncio loop; `stage`, `apply` and the properties are called from the subscriber's
thread. Between `paused()` entering and leaving, no token is sampled, and requests in flight stay.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ...schemas.delta import TensorPatch, WeightUpdate
from ...schemas.trajectory import VersionSpan

__all__ = [
    "Engine",
    "GenerateRequest",
    "GenerateResult",
    "ReadsBack",
    "Stages",
    "TensorPatch",
    "VersionSpan",
    "WeightUpdate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One engine call."""

    request_id: str
    token_ids: tuple[int, ...]
    """The whole context; never empty."""
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends the turn; the one that was sampled is part of the result."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """What was sampled."""

    request_id: str
    token_ids: tuple[int, ...]
    """The sampled tokens, a sampled stop token included."""
    logprobs: tuple[float, ...]
    """Same length; under the distribution that each token was drawn from."""
    version_spans: tuple[VersionSpan, ...]
    """Tile [0, len(token_ids))."""
    finish_reason: str
    """`stop`, `length` or `abort`."""


class Engine(Protocol):
    """An inference engine that follows a policy."""

    @property
    def version(self) -> int:
        """The policy version that the next token is sampled under; -1 before the first weights."""

    @property
    def running(self) -> int:
        """Requests in flight."""

    @property
    def alive(self) -> bool:
        """False once it can never serve again: its loop has ended, or it is closed."""

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since the start."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def logprobs_mode(self) -> str:
        """`processed` or `raw`."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn. Raises EngineError; EnginePoisonedError while its weights are torn.

        Cancelling the awaiting task aborts the request.
        """

    def paused(self) -> AbstractContextManager[None]:
        """No token is sampled inside the block. Entering waits for the step that is running.

        An operator's pause is held by one thread while another applies updates.
        """

    def apply(self, update: WeightUpdate) -> None:
        """Write `update` in place; only inside `paused()`. `version` is the new one when the pause ends."""

    def advance(self, version: int) -> None:
        """The same weights under the next version number: no pause is needed. Later tokens carry it."""

    def weights_hash(self) -> int:
        """Rolling hash (uint64) of the live weights as bf16, in full; only inside `paused()`."""

    def poison(self) -> None:
        """Refuse requests, and fail those in flight, until the next successful `apply` of an anchor."""

    def close(self) -> None:
        """Abort what is in flight and release everything. Idempotent."""


@runtime_checkable
class ReadsBack(Protocol):
    """An engine that can look at some of its live weights; the others are hashed in full inside every pause."""

    def verify(self, update: WeightUpdate) -> None:
        """WeightUpdateError(`live_bits`) unless the live weights hold what `update` says, wherever it says something.

        Called inside `paused()` after `apply`, and now and then with everything while tokens flow.
        """


@runtime_checkable
class Stages(Protocol):
    """An engine that can do a part of an update's work before the pause."""

    def stage(self, update: WeightUpdate) -> None:
        """Get ready for `update` while tokens flow: check that it fits (else WeightUpdateError), move it near.

        Writes nothing. The next `apply` is of this same object, or never comes.
        """

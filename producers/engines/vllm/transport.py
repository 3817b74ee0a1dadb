"""What VllmEngine needs of a vLLM, wherever it runs. All methods belong to one event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..protocol import GenerateRequest, VersionSpan

Sampled = Callable[[Sequence[int], Sequence[float]], None]
"""Takes token ids and their log-probabilities as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a running vLLM is."""

    vocab_size: int
    context: int
    """Longest prompt and completion together, in tokens."""
    ranks: int
    logprobs_mode: Literal["processed", "raw"]


@dataclass(frozen=True, slots=True)
class Finished:
    """How a request ended."""

    reason: str
    """`stop`, `length` or `abort`."""
    spans: tuple[VersionSpan, ...]
    """vLLM's own account; tiles the tokens."""


class Transport(Protocol):
    """One vLLM."""

    exact_counts: bool
    """True: when `pause` returns, every token that was sampled before it has been handed over."""

    async def start(self) -> Facts:
        """Connect, or start it. Raises ConfigError, EngineError."""

    @property
    def alive(self) -> bool:
        """False once it can never serve again."""

    async def generate(
        self, key: str, request: GenerateRequest, max_tokens: int, salt: str, sampled: Sampled
    ) -> Finished:
        """Sample; cancelling aborts. `salt`: requests with different ones never share cached keys and values."""

    async def abort(self, keys: Sequence[str]) -> None:
        """End these requests early."""

    async def pause(self, mode: Literal["keep", "abort", "wait"]) -> None:
        """Stop sampling; keeps all caches."""

    async def resume(self) -> None:
        """Go on."""

    async def prefill_again(self) -> None:
        """Forget all keys and values; requests in flight compute them anew. Only while paused."""

    async def rpc(self, method: str, *args: str) -> list[dict[str, Any]]:
        """A method of the worker extension on every rank."""

    async def write(self, version: int) -> None:
        """Have every rank write a staged update; `headrace_wrote` tells how that went."""

    async def label(self, version: int) -> None:
        """Only the label."""

    async def close(self) -> None:
        """Disconnect, or end it. Idempotent."""


def spans_of(labels: Sequence[tuple[str, int, int]]) -> tuple[VersionSpan, ...]:
    """From vLLM's (label, start, end)."""
    return tuple(VersionSpan(version=int(v), start=s, end=e) for v, s, e in labels if e > s)


def facts_of(ranks: Sequence[dict[str, Any]]) -> Facts:
    """From what `headrace_hello` says on every rank."""
    said = ranks[0]
    return Facts(
        vocab_size=said["vocab_size"],
        context=said["context"],
        ranks=len(ranks),
        logprobs_mode="processed" if said["logprobs_mode"] == "processed_logprobs" else "raw",
    )

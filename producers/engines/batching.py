"""transformers' continuous-batching manager with what it lacks: a pause between two steps, and batched results.

Another thread may hold the loop before it prepares its next step: no request is then half-way through one, and
requests and cache may be looked at and changed. Results leave in one hand-over per step, not one per token.
The names with an underscore are private to transformers 5.17; they are used in this file alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from ...schemas.errors import EngineError
from . import sampling

logger = logging.getLogger(__name__)

PAGE = 16
"""Tokens in one block of the cache."""

Deliver = Callable[[list[Any]], None]
"""Takes the GenerationOutputs of one step, in the loop's thread."""


class _Router(OutputRouter):
    def __init__(self, deliver: Deliver) -> None:
        super().__init__()
        self._deliver = deliver

    def deliver(self, output: Any) -> None:
        self._deliver([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        self._deliver(outputs)


class PausableManager(ContinuousBatchingManager):
    """The manager; `deliver` gets finished and failed requests."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        deliver: Deliver,
        max_requests: int,
        max_batch_tokens: int,
        cache_tokens: int,
        seed: int | None = None,
    ) -> None:
        # Prefix sharing is off: blocks of one request are never read by another, so none outlives its weights.
        config = ContinuousBatchingConfig(
            block_size=PAGE,
            num_blocks=max(2, cache_tokens // PAGE),
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=min(max_requests, max_batch_tokens),
            return_logprobs=True,
            allow_block_sharing=False,
            use_async_batching=False,
            use_cuda_graph=False,
            seed=seed,
        )
        # An explicit empty pad token keeps transformers from guessing one out of the end-of-sequence tokens.
        super().__init__(model, GenerationConfig(do_sample=True, pad_token_id=0), config)
        self.logit_processor = sampling.processors()
        self.output_router = _Router(deliver)
        self._gate = threading.Condition()
        self._pausers = threading.Lock()
        self._wanted = False
        self._parked = False
        self._between: list[Callable[[], None]] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Holds the loop between two steps; a loop that has ended counts as held. One holder at a time, not reentrant."""
        with self._pausers:
            with self._gate:
                self._wanted = True
                self._has_new_requests.set()  # an idle loop wakes up and parks
                while not self._parked and self.is_running():
                    self._gate.wait(0.05)
            try:
                yield
            finally:
                with self._gate:
                    self._wanted = False
                    self._gate.notify_all()
                    # The next holder must not take this parking for its own.
                    while self._parked and self.is_running():
                        self._gate.wait(0.05)

    def between_steps(self, call: Callable[[], None]) -> None:
        """Have the loop's thread run `call` before its next step, without waiting for it."""
        with self._gate:
            self._between.append(call)
        self._has_new_requests.set()

    def submit(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        *,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        temperature: float,
        top_p: float,
        top_k: int,
    ) -> None:
        """Queue one request. Raises EngineError when the loop has ended."""
        accepted = self.add_request(
            list(token_ids),
            request_id=request_id,
            max_new_tokens=max_tokens,
            eos_token_id=list(stop_token_ids),
            temperature=float(temperature),
            top_p=float(top_p),
            top_k=int(top_k),
        )
        if accepted is None:
            raise EngineError(f"the engine's loop has ended: {self.background_thread_status.fatal_error}")

    def progress(self) -> dict[str, int]:
        """Request id -> tokens sampled so far, for every request that the scheduler knows."""
        if self.batch_processor is None:
            return {}
        scheduler = self.batch_processor.scheduler
        # A request that lost its cache to others waits again, with the tokens that it has.
        states = [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]
        return {state.request_id: sampled_count(state) for state in states}

    def prefill_again(self) -> None:
        """Drop every request's keys and values; each goes on from its tokens. Only inside `paused()`."""
        if self.batch_processor is None:
            return
        scheduler = self.batch_processor.scheduler
        states = list(scheduler.active_requests.values())
        for state in states:
            scheduler.finish_request(state.request_id)
        # In front of those that have not started, in their old order.
        for state in reversed(states):
            again = state.create_equivalent_initial_request()
            scheduler.waiting_requests[again.request_id] = again
            scheduler.waiting_requests_order.appendleft(again.request_id)

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        if self._wanted or self._between:
            with self._gate:
                calls, self._between = self._between, []
                for call in calls:
                    call()
                while self._wanted:
                    self._parked = True
                    self._gate.notify_all()
                    self._gate.wait()
                self._parked = False
                self._gate.notify_all()
        return super()._generation_loop_body(batch_processor, bootstrapping)


def sampled_count(state: Any) -> int:
    """Tokens sampled for a request, those before it was sent to prefill again included."""
    moved = len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
    return moved + len(state.generated_tokens)

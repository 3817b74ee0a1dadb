"""Parts for tests of the rollout worker: a character-level policy directory, engines that answer from a script."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

from headrace.producers.engines.protocol import GenerateRequest, GenerateResult
from headrace.schemas.errors import EngineError
from headrace.schemas.trajectory import VersionSpan

CHARACTERS = "0123456789+=[]>$ "


def write_policy(folder: Path) -> Path:
    """A model directory with a tokenizer of 17 characters ('$' ends a sequence) and no weights."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import Fuse
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="$").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(CHARACTERS), "eos_token_id": 15}))
    return folder


def ids_of(text: str) -> tuple[int, ...]:
    """Character ids."""
    return tuple(CHARACTERS.index(c) for c in text)


def text_of(ids: tuple[int, ...]) -> str:
    """The inverse."""
    return "".join(CHARACTERS[i] for i in ids)


def result(
    request: GenerateRequest,
    text: str,
    *,
    version: int = 0,
    finish: str = "stop",
    spans: tuple[VersionSpan, ...] | None = None,
) -> GenerateResult:
    """`text` sampled with logprobs -0.5, -1.0, ... under one version, or under `spans`."""
    ids = ids_of(text)
    return GenerateResult(
        request_id=request.request_id,
        token_ids=ids,
        logprobs=tuple(-0.5 * (i + 1) for i in range(len(ids))),
        version_spans=spans or (VersionSpan(version, 0, len(ids)),),
        finish_reason=finish,
    )


def calculate(context: str) -> str:
    """What a policy that can use the calculator writes next."""
    if context.endswith(">"):
        return context[context.rindex("]") + 1 : -1] + "$"
    match = re.search(r"(\d+\+\d+)=$", context)
    return f"[{match[1]}]" if match else "$"


class ScriptedClient:
    """An engine client that answers `script(context)`; fails for good after `breaks_after` calls."""

    def __init__(
        self, script: Callable[[str], str] = calculate, version: Callable[[], int] = lambda: 0
    ) -> None:
        self.script, self.version = script, version
        self.breaks_after: int | None = None
        self.calls = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.calls += 1
        await asyncio.sleep(0)
        if self.breaks_after is not None and self.calls > self.breaks_after:
            raise EngineError("connection refused")
        return result(request, self.script(text_of(request.token_ids)), version=self.version())

    async def close(self) -> None:
        return None

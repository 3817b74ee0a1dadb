"""Text -> ids and back for one policy, so that untrusted text can never write a control token.

Sampled ids are decoded for people and rewards, never encoded again. What is appended to a conversation is the
textual difference of two renders of the chat template, and only where the earlier is a prefix of the later.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...schemas.errors import ConfigError, HeadraceError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""{role, content, ...}, as chat templates take it."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
TRUSTED_ROLES = ("assistant",)
_PRIVATE_USE = range(0xE000, 0xF900)


class TokenizingError(HeadraceError):
    """Text that has no faithful token form here. `reason`: `template`, `special_token`, `vocabulary`, `empty`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class PolicyTokenizer:
    """The tokenizer of a policy's model directory."""

    def __init__(self, tokenizer: Any, *, eos_ids: Sequence[int], vocab_size: int) -> None:
        """`tokenizer`: a transformers tokenizer; `eos_ids`: every id at which the model ends a turn."""
        self._tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = vocab_size
        added = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items()}
        special = set(tokenizer.all_special_ids)
        self._control_ids = frozenset(i for i, t in added.items() if len(t) > 1 or i in special)
        texts = sorted({t for t in added.values() if len(t) > 1}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, texts))) if texts else None
        whole = tokenizer("").input_ids
        self._bos = (
            tuple(whole) if len(whole) == 1 and whole[0] == getattr(tokenizer, "bos_token_id", None) else ()
        )
        # The same short texts come back in most rollouts.
        self.text_ids = functools.lru_cache(maxsize=8192)(self._text_ids)

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """A raw prompt, behind the beginning-of-sequence token where the tokenizer puts one."""
        if self._control is not None and self._control.search(prompt):
            logger.warning("a raw prompt spells a control token; it is ordinary text there: use messages")
        return self._bos + self.text_ids(prompt)

    def chat_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A conversation up to where the assistant speaks. TokenizingError where the template refuses."""
        cut = _unused_character(messages)
        return self._rendered_ids(self._render(self._defanged(messages, cut), True), cut)

    def bridge_ids(
        self, before: Sequence[Message], answer: str, new: Sequence[Message], *, closed: bool
    ) -> tuple[int, ...]:
        """What follows the sampled `answer` (without its end token) when `new` messages come after it.

        `closed`: the end token was sampled and is in the context; otherwise it is part of the result.
        TokenizingError(`template`) where it cannot be shown that the template only appends.
        """
        cut = _unused_character([*before, *new, {"content": answer}])
        head = self._defanged(before, cut)
        spoken: list[Message] = [*head, {"role": "assistant", "content": answer}]
        earlier = self._render(spoken, False)
        later = self._render([*spoken, *self._defanged(new, cut)], True)
        if not later.startswith(earlier):
            raise TokenizingError("template", "the chat template rewrites earlier messages")
        end, at = max(((t, earlier.rfind(t)) for t in self._eos_texts), key=lambda x: x[1], default=("", -1))
        if at < 0 or earlier.count(end) <= self._render(head, False).count(end):
            raise TokenizingError("template", "the chat template does not close an assistant message")
        return self._rendered_ids(later[at + len(end) if closed else at :], cut)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, special tokens kept."""
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def without_end(self, ids: Sequence[int]) -> Sequence[int]:
        """`ids` without a sampled end-of-sequence token at the end."""
        return ids[:-1] if ids and ids[-1] in self.eos_ids else ids

    def stop_ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        """The model's end-of-sequence ids and those of `texts`; ConfigError for a text that is not one token."""
        ids = dict.fromkeys(self.eos_ids)
        for text in texts:
            try:
                found = self._encode(text)
            except TokenizingError:
                found = []
            if len(found) != 1 or self.decode(found) != text:
                raise ConfigError(
                    f"rollout.stop: {text!r} is not one token of this model (it is {found}); "
                    "stop texts end a turn at a single token"
                )
            ids[found[0]] = None
        if not ids:
            raise ConfigError("the model has no end-of-sequence token and rollout.stop is empty")
        return tuple(ids)

    def _text_ids(self, text: str) -> tuple[int, ...]:
        ids = [i for piece in self._pieces(text) for i in self._encode(piece)]
        forbidden = self._control_ids.intersection(ids)
        if forbidden:
            raise TokenizingError(
                "special_token", f"{self.decode(sorted(forbidden))!r} has no ordinary form in this vocabulary"
            )
        return tuple(ids)

    def _pieces(self, text: str) -> Iterator[str]:
        """`text` in parts, none of which holds a control token's text: they are cut after their first character."""
        start = 0
        while self._control is not None and (match := self._control.search(text, start)):
            yield text[start : match.start() + 1]
            start = match.start() + 1
        yield text[start:]

    def _defanged(self, messages: Sequence[Message], cut: str) -> list[Message]:
        """`messages` with the character `cut` inside whatever spells a control token in an untrusted role."""

        def clean(value: Any) -> Any:
            if isinstance(value, str):
                return cut.join(self._pieces(value))
            if isinstance(value, Mapping):
                return {k: v if k in ("role", "type") else clean(v) for k, v in value.items()}
            return [clean(v) for v in value] if isinstance(value, list | tuple) else value

        return [m if m.get("role") in TRUSTED_ROLES else clean(m) for m in messages]

    def _rendered_ids(self, rendered: str, cut: str) -> tuple[int, ...]:
        ids = tuple(i for piece in rendered.split(cut) for i in self._encode(piece))
        if not ids:
            raise TokenizingError("empty", "the chat template rendered nothing")
        return ids

    def _render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as e:  # templates are programs of the model's author
            raise TokenizingError("template", f"{type(e).__name__}: {str(e)[:200]}") from e

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            return self._tokenizer(text, add_special_tokens=False).input_ids
        except Exception as e:  # the tokenizers library raises plain Exception
            raise TokenizingError("vocabulary", f"{text[:80]!r}: {str(e)[:200]}") from None

    @functools.cached_property
    def _eos_texts(self) -> list[str]:
        return [self.decode([i]) for i in self.eos_ids]


def load_tokenizer(model: Path | None) -> PolicyTokenizer:
    """The tokenizer in a model directory, read offline. ConfigError says what is missing."""
    if model is None:
        raise ConfigError("policy.model is not set: name a Hugging Face model directory")
    if not model.is_dir():
        raise ConfigError(f"policy.model {model} is not a directory")
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"policy.model {model} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there; "
            "copy the base model's tokenizer files into it (tokenizer.save_pretrained writes them)"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    except Exception as e:
        raise ConfigError(
            f"the tokenizer in policy.model {model} cannot be read: {type(e).__name__}: {str(e)[:300]}"
        ) from e
    eos = [tokenizer.eos_token_id, _json(model / "generation_config.json").get("eos_token_id")]
    settings = _json(model / "config.json")
    eos.append(settings.get("eos_token_id"))
    ids = [i for item in eos if item is not None for i in (item if isinstance(item, list) else [item])]
    size = settings.get("vocab_size") or (settings.get("text_config") or {}).get("vocab_size")
    return PolicyTokenizer(
        tokenizer, eos_ids=list(dict.fromkeys(ids)), vocab_size=int(size or len(tokenizer))
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from None


def _unused_character(messages: Sequence[Message]) -> str:
    """A character that no message holds: it marks cuts through the template's rendering."""
    used = set(json.dumps([dict(m) for m in messages], ensure_ascii=False, default=str))
    return next(c for c in map(chr, _PRIVATE_USE) if c not in used)

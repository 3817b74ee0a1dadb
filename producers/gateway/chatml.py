"""The exact renderer for ChatML: Qwen3 and its relatives, whose turns are <|im_start|>role ... <|im_end|>.

How a message is written depends on what came before it, never on what comes after: so each prefix of a
conversation is a prefix of its tokens. `ChatMLRenderer` lists where Qwen3's own template does otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .messages import Message, Role, Tool
from .renderer import Past, RenderError
from .renderer_text import Part, TextEncoder

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOT = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
)
_CALL_FORM = '\n{"name": <function-name>, "arguments": <args-json-object>}\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMLStyle:
    """In what the relatives differ."""

    opening: tuple[str, ...] = ()
    """Written after `assistant\\n` in the generation prompt: marker or text each, such as ("<think>", "\\n")."""
    default_system: str | None = None
    """The system message of a conversation that has none."""
    extra_stop: tuple[str, ...] = ("<|endoftext|>",)
    """Tokens beside <|im_end|> at which the model stops, where the vocabulary has them."""


class ChatMLRenderer:
    """A Renderer; see there for what the methods promise.

    Id for id what Qwen3's chat template and tokenizer give, except:

    - Reasoning of turns before the last question: the template drops it, which rewrites tokens that were sampled.
      Here it stays where the client sends it.
    - Reasoning inside an answer's text (`<think>..</think>answer`): the template cuts it out there and prints it as
      a block. Here text is text; an API's parser puts reasoning into its own field.
    - An answer as the last message: the template writes an empty <think> block into it, and none once it is not
      the last. Here none.
    - Tool arguments that a server has parsed before it renders them are printed anew (spaces, escapes). Here the
      client's bytes stay.
    - Control tokens spelled in messages and tools (`<|im_end|>`, `<tool_call>`): the tokenizer makes them real.
      Here they are ordinary text.
    - A developer's messages: the template drops them. Here they are system messages.
    - A sampled turn stays as it was sampled: the template's text of it may have other tokens.
    """

    def __init__(self, tokenizer: Any, style: ChatMLStyle | None = None) -> None:
        """`tokenizer`: as TextEncoder takes it. RenderError where it has no ChatML control tokens."""
        self._text = TextEncoder(tokenizer)
        self._style = style or ChatMLStyle()
        missing = {"<|im_start|>", "<|im_end|>"} - self._text.control.keys()
        if missing:
            raise RenderError(f"not a ChatML vocabulary: it has no {' and no '.join(sorted(missing))}")
        self._start, self._end = self._text.control["<|im_start|>"], self._text.control["<|im_end|>"]
        extra = (self._text.control.get(t) for t in self._style.extra_stop)
        self._stop_ids = (self._end, *(i for i in extra if i is not None))
        pairs = (("<think>", "</think>"), ("<tool_call>", "</tool_call>"))
        known = self._text.control
        self._blocks = {known[a]: known[b] for a, b in pairs if a in known and b in known}
        self._generation: list[Part] = [
            self._start,
            "assistant\n",
            *map(self._text.marker, self._style.opening),
        ]
        self._between = self._text.encode(["\n"])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """<|im_end|> first."""
        return self._stop_ids

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones too."""
        return self._text.vocab_size

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The head, the messages, the generation prompt."""
        parts: list[Part] = []
        rest = self._head(parts, messages, tools)
        self._turns(parts, rest)
        return self._text.encode([*parts, *self._generation])

    def close(self, sampled: Sequence[int]) -> list[int]:
        """Open <think> and <tool_call> blocks, <|im_end|> unless it was sampled, and a newline."""
        ids: list[int] = []
        if not (len(sampled) and sampled[-1] == self._end):
            block = self._open_block(sampled)
            ids = [self._end] if block is None else [block, self._end]
        return ids + self._between

    def extend(self, past: Past, new: Sequence[Message]) -> list[int]:
        """The new messages and the generation prompt; what is past makes no difference to them."""
        parts: list[Part] = []
        self._turns(parts, new)
        return self._text.encode([*parts, *self._generation])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, control tokens spelled out."""
        return self._text.decode(ids)

    def _open_block(self, sampled: Sequence[int]) -> int | None:
        """The id that closes the block in which `sampled` ends. Blocks do not nest."""
        opened = [self._text.control.get(t, -1) for t in self._style.opening]
        closer = None
        for i in [*opened, *sampled]:
            if closer is None:
                closer = self._blocks.get(i)
            elif i == closer:
                closer = None
        return closer

    def _head(
        self, parts: list[Part], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> Sequence[Message]:
        """Writes the first system message and the tools; what is left to write."""
        own = bool(messages) and messages[0].role in (Role.SYSTEM, Role.DEVELOPER)
        system = messages[0].text if own else self._style.default_system
        if tools:
            lead = "system\n" if system is None else f"system\n{system}\n\n"
            listed = "".join("\n" + tool_json(tool) for tool in tools)
            call, called = self._text.marker("<tool_call>"), self._text.marker("</tool_call>")
            foot: list[Part] = [call, called, " XML tags:\n", call, _CALL_FORM, called, self._end, "\n"]
            parts += [self._start, lead + _TOOLS_HEAD + listed + _TOOLS_FOOT, *foot]
        elif system is not None:
            parts += [self._start, f"system\n{system}", self._end, "\n"]
        return messages[1:] if own else messages

    def _turns(self, parts: list[Part], messages: Sequence[Message]) -> None:
        for i, message in enumerate(messages):
            match message.role:
                case Role.TOOL:
                    first = i == 0 or messages[i - 1].role is not Role.TOOL
                    last = i + 1 == len(messages) or messages[i + 1].role is not Role.TOOL
                    self._tool_result(parts, message, first=first, last=last)
                case Role.ASSISTANT:
                    self._assistant(parts, message)
                case role:
                    name = "user" if role is Role.USER else "system"
                    parts += [self._start, f"{name}\n{message.text}", self._end, "\n"]

    def _tool_result(self, parts: list[Part], message: Message, *, first: bool, last: bool) -> None:
        """Results that follow each other share one user turn."""
        if first:
            parts += [self._start, "user"]
        opening, closing = self._text.marker("<tool_response>"), self._text.marker("</tool_response>")
        parts += ["\n", opening, f"\n{message.text}\n", closing]
        if last:
            parts += [self._end, "\n"]

    def _assistant(self, parts: list[Part], message: Message) -> None:
        """A turn that was not sampled here: an example, or history of another session."""
        parts += [self._start, "assistant\n"]
        text = message.text
        if message.reasoning:
            thought = message.reasoning.strip("\n")
            parts += [
                self._text.marker("<think>"),
                f"\n{thought}\n",
                self._text.marker("</think>"),
                "\n\n",
            ]
            text = text.lstrip("\n")
        parts.append(text)
        for i, call in enumerate(message.tool_calls):
            body = f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n'
            parts += ["\n"] if i or text else []
            parts += [self._text.marker("<tool_call>"), body, self._text.marker("</tool_call>")]
        parts += [self._end, "\n"]


def tool_json(tool: Tool) -> str:
    """A tool as chat templates print it (`tojson` of transformers: key order and non-ASCII kept)."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)

"""The ChatML renderer beside Qwen3's chat template, on Qwen3's vocabulary: equal but for the differences it lists."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from gateway_kit import answer, call, said, system, tool, user, wants
from qwen_kit import Template, installed_file, qwen3_tokenizer
from tokenizers import Tokenizer

from headrace.producers.gateway.capture import Session
from headrace.producers.gateway.chatml import ChatMLRenderer
from headrace.producers.gateway.messages import Message, Role, Tool
from headrace.producers.gateway.rows import Rollout

CONVERSATIONS = 240
OWN = Path(__file__).parent / "templates" / "qwen3_like.jinja"
WORDS = (
    *(
        "the",
        "fish",
        " fishing",
        "HAVING",
        "json",
        "parse_args(",
        "x = 3.14",
        "1234567",
        "毕老师！",
        "дом",
        "naïve",
    ),
    *(
        "🙂",
        "e\u0301",
        "\t",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "```py\n",
        "{",
        "}",
        '"',
        "\\n",
        "<b>",
        "</",
        "|",
        "<|",
        "it's",
    ),
    *("user", "assistant\n", "im_end", "think", ".", ", ", "?\n", " \n ", "-", "—", "%s", "#"),
)
Corpus = list[tuple[list[Message], tuple[Tool, ...]]]


@pytest.fixture(scope="session")
def qwen3(request: pytest.FixtureRequest) -> Tokenizer:
    assert request.config.cache is not None
    return qwen3_tokenizer(request.config.cache.mkdir("qwen3"))


@pytest.fixture(scope="session")
def template(qwen3: Tokenizer) -> Template:
    return Template(OWN.read_text(), qwen3)


@pytest.fixture(scope="session")
def renderer(qwen3: Tokenizer) -> ChatMLRenderer:
    return ChatMLRenderer(qwen3)


def trl_template(name: str, tokenizer: Tokenizer) -> Template:
    """A template that the wheel of TRL carries."""
    path = installed_file("trl", f"chat_templates/{name}.jinja")
    if path is None:
        pytest.skip("no TRL: pip install --no-deps trl==1.16.0")
    return Template(path.read_text(), tokenizer)


def words(rng: random.Random, most: int = 12) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(("", " ", " ")) for _ in range(rng.randint(1, most)))


def schema(rng: random.Random, name: str) -> Tool:
    fields = {
        rng.choice(("path", "größe", "n")): {"type": "string", "description": words(rng)} for _ in range(2)
    }
    parameters = {"type": "object", "properties": fields, "required": list(fields)[:1]}
    return Tool(name=name, description=rng.choice((None, words(rng))), parameters=parameters)


def tool_loop(rng: random.Random, messages: list[Message], thinks: bool) -> None:
    """An answer that calls tools, and their results."""
    calls = [
        wants(rng.choice(("read", "write")), json.dumps({"path": words(rng, 3)}), f"c{i}")
        for i in range(rng.randint(1, 3))
    ]
    text = rng.choice(("", words(rng)))
    reasoning = rng.choice((None, words(rng), "\n" + words(rng) + "\n")) if thinks else None
    messages.append(said(text, *calls, reasoning=reasoning))
    messages += [tool(rng.choice(("", words(rng), words(rng, 60))), c.id) for c in calls]


def conversation(rng: random.Random) -> tuple[list[Message], tuple[Tool, ...]]:
    """One whose prefixes the template leaves alone: no reasoning before the last question."""
    tools = tuple(schema(rng, name) for name in ("read", "write")[: rng.randint(0, 2)])
    messages = [system(words(rng)) for _ in range(rng.choice((0, 1, 1, 2)))]
    for _ in range(rng.randint(0, 3)):
        messages.append(user(words(rng, 40)))
        for _ in range(rng.randint(0, 2)):
            tool_loop(rng, messages, thinks=False)
        messages.append(said(words(rng)))
        if rng.random() < 0.2:
            messages.append(system(words(rng)))
    messages.append(user(words(rng)))
    for _ in range(rng.randint(0, 3)):
        tool_loop(rng, messages, thinks=True)
    return messages, tools


def corpus() -> Corpus:
    rng = random.Random(20)
    return [conversation(rng) for _ in range(CONVERSATIONS)]


def test_the_renderer_is_the_template_id_for_id(renderer: ChatMLRenderer, template: Template) -> None:
    found = corpus()
    assert sum(bool(tools) for _, tools in found) > 100
    assert sum(m.reasoning is not None for messages, _ in found for m in messages) > 100
    for messages, tools in found:
        assert renderer.open(messages, tools) == template.ids(messages, tools), messages


def test_our_copy_of_the_template_prints_what_the_original_prints(
    qwen3: Tokenizer, template: Template
) -> None:
    original = trl_template("qwen3", qwen3)
    for messages, tools in corpus():
        assert template.text(messages, tools) == original.text(messages, tools)


def played(
    renderer: ChatMLRenderer, qwen3: Tokenizer, messages: list[Message], tools: tuple[Tool, ...]
) -> list[int]:
    """The last prompt of a session whose engine says each answer as the template prints it."""
    s = Session(Rollout(rollout_id="r", policy_id="p"), renderer)
    end = qwen3.token_to_id("<|im_end|>")
    for i, message in enumerate(messages):
        if message.role is not Role.ASSISTANT:
            continue
        plan = s.begin(call(*messages[:i], tools=tools))
        alone = renderer.open([message], ())
        drawn = alone[3 : alone.index(end) + 1]  # behind <|im_start|>, "assistant", "\n"
        assert s.begin(call(*messages[:i], tools=tools)).prompt_ids == plan.prompt_ids
        answer(s, plan, drawn, message)
    plan = s.begin(call(*messages, tools=tools))
    assert plan.branch is None
    return list(plan.prompt_ids)


def unspaced(messages: list[Message]) -> list[Message]:
    """Answers that start with a letter: a newline before them would join the template's own."""
    return [replace(m, text="So: " + m.text) if m.role is Role.ASSISTANT else m for m in messages]


def test_a_session_turn_by_turn_arrives_at_the_template_too(
    renderer: ChatMLRenderer, qwen3: Tokenizer, template: Template
) -> None:
    for messages, tools in corpus()[::4]:
        spoken = unspaced(messages)
        assert played(renderer, qwen3, spoken, tools) == template.ids(spoken, tools)


def test_a_session_that_thinks_in_every_turn_arrives_at_the_prefix_preserving_twin(
    renderer: ChatMLRenderer, qwen3: Tokenizer
) -> None:
    twin = trl_template("qwen3_training", qwen3)
    for messages, tools in corpus()[::4]:
        thinking = [
            replace(m, reasoning=m.reasoning or "hm") if m.role is Role.ASSISTANT else m
            for m in unspaced(messages)
        ]
        assert played(renderer, qwen3, thinking, tools) == twin.ids(thinking, tools)


def test_the_differences_are_those_that_are_listed(
    renderer: ChatMLRenderer, qwen3: Tokenizer, template: Template
) -> None:
    def both(*messages: Message) -> tuple[str, str]:
        ours = qwen3.decode(renderer.open(messages, ()), skip_special_tokens=False)
        return ours, template.text(messages)

    ours, theirs = both(user("a"), said("b", reasoning="deep"), user("c"))
    assert "deep" in ours and "deep" not in theirs
    ours, theirs = both(user("a"), said("b"))
    assert "<think>" not in ours and "<think>" in theirs
    spelled = user("a<|im_end|>b")
    end = qwen3.token_to_id("<|im_end|>")
    assert renderer.open([spelled], ()).count(end) == 1
    assert template.ids([spelled]).count(end) == 2
    thinking = said("<think>\ndeep\n</think>\n\nb")
    assert qwen3.token_to_id("<think>") not in renderer.open([user("a"), thinking, tool("x")], ())
    assert qwen3.token_to_id("<think>") in template.ids([user("a"), thinking, tool("x")])
    ours, _ = both(user("a"), said("", wants("f", '{"a":1}')), tool("x"))
    assert '"arguments": {"a":1}}' in ours
    ours, _ = both(user("a"), Message(role=Role.DEVELOPER, text="obey"))
    assert "<|im_start|>system\nobey<|im_end|>" in ours

"""Whatever clients and engines do: prompts extend what was sampled or a branch is recorded, and nothing is trained twice."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace

from gateway_kit import (
    CALL,
    CALLED,
    END,
    START,
    THINK,
    THOUGHT,
    call,
    ids,
    said,
    session,
    system,
    text,
    tool,
    user,
    wants,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.producers.engines.protocol import GenerateResult, VersionSpan
from headrace.producers.gateway.capture import Outcome, Plan, Sampled, Session
from headrace.producers.gateway.lineage import Lineage
from headrace.producers.gateway.messages import Message, Role, Tool
from headrace.producers.gateway.messages import Sampling as Drawn
from headrace.producers.gateway.tree import Node, Thinking
from headrace.schemas.trajectory import TrajectoryStatus, check_trajectory

words = st.text(alphabet="hi \nelo<|im_end|>é", max_size=8)
drawn_ids = st.lists(st.integers(0, START - 1), max_size=6)
BLOCKS = {THINK: THOUGHT, CALL: CALLED}


@dataclass
class Agent:
    """What a client knows: its conversation, which it replays with every request."""

    lineage: Lineage
    tools: tuple[Tool, ...] = ()
    messages: list[Message] = field(default_factory=list)
    last: tuple[Node, ...] = ()
    """The answers to its newest request."""


class World:
    """A session, its agents, and everything that engines saw and said."""

    def __init__(self, data: st.DataObject, thinking: Thinking) -> None:
        self.data, self.session = data, session(thinking)
        self.agents = [self.agent("", None), self.agent("helper", "")]
        self.logprobs = (-(i + 1) / 4096 for i in itertools.count())
        self.engine: dict[int, tuple[int, ...]] = {}
        """Turn -> the prompt that the engine was given and what it sampled."""

    def agent(self, label: str, parent: str | None) -> Agent:
        return Agent(Lineage(label=label, parent=parent), messages=[system(f"agent {label}")])

    def draw(self, strategy: st.SearchStrategy) -> object:
        return self.data.draw(strategy)

    def sampled(self) -> Sampled:
        """One completion: thought, text, calls; ended by its stop id, by length anywhere, or by a stop string."""
        d = self.data.draw
        values: list[int] = []
        thought = d(st.none() | drawn_ids)
        if thought is not None:
            values += [THINK, *thought, THOUGHT]
        spoken = d(drawn_ids)
        values += spoken
        calls = []
        for i in range(d(st.integers(0, 2))):
            arguments = json.dumps({"b": i, "a": [d(words)]})
            values += [CALL, *ids(f"{i}"), CALLED]
            calls.append(wants(f"f{i}", arguments, f"c{len(self.engine)}-{i}"))
        finish = d(st.sampled_from(["stop", "stop", "length", "stop string"]))
        if finish == "stop":
            values.append(END)
        elif finish == "length":
            values = values[: d(st.integers(0, len(values)))]
        n = len(values)
        split = d(st.integers(0, n))
        spans = [VersionSpan(3, 0, split), VersionSpan(4, split, n)]
        result = GenerateResult(
            request_id="q",
            token_ids=tuple(values),
            logprobs=tuple(itertools.islice(self.logprobs, n)),
            version_spans=tuple(s for s in spans if s.end > s.start),
            finish_reason=finish.split()[0],
        )
        if n and d(st.integers(0, 9)) == 0:
            result = replace(result, logprobs=result.logprobs[1:])
        reasoning = None if thought is None else text(thought)
        answer = said(text(spoken), *calls, reasoning=reasoning)
        return Sampled(result=result, answer=answer)

    def ask(self, agent: Agent, messages: list[Message]) -> None:
        """One request, answered."""
        n = self.data.draw(st.sampled_from([1, 1, 1, 2]))
        plan = self.session.begin(
            call(*messages, tools=agent.tools, sampling=Drawn(n=n)), lineage=agent.lineage
        )
        assert plan.outcome is Outcome.GENERATE
        self.check_prompt(plan, messages)
        if self.data.draw(st.integers(0, 9)) == 0:
            self.session.abandon(plan)
            return
        delivered = self.data.draw(st.integers(0, 5)) > 0
        turns = [self.sampled() for _ in range(n)]
        nodes = self.session.commit(plan, turns, delivered=delivered)
        for node, turn in zip(nodes, turns, strict=True):
            self.engine[node.number] = (*plan.prompt_ids, *turn.result.token_ids)
        if delivered or self.data.draw(st.booleans()):
            agent.messages = [*messages, self.data.draw(st.sampled_from(turns)).answer]
            agent.last = nodes

    def check_prompt(self, plan: Plan, messages: list[Message]) -> None:
        """It starts with all that its parent's engine call saw and said, and no block is open at a header."""
        prompt = plan.prompt_ids
        if plan.parent is not None:
            before = self.engine[plan.parent.number]
            assert prompt[: len(before)] == before
        headers = [i for i, token in enumerate(prompt) if token == START]
        results = [m.role is Role.TOOL for m in messages]
        turns = len(messages) - sum(a and b for a, b in itertools.pairwise(results))
        assert len(headers) == turns + 1 + bool(
            plan.call and plan.call.tools and messages[0].role is not Role.SYSTEM
        )
        opened = None
        for token in prompt:
            assert not (token == START and opened is not None)
            opened = BLOCKS.get(token) if opened is None else None if token == opened else opened

    def replayed(self, message: Message) -> Message:
        """A message as clients give it back without meaning to change it."""
        d = self.data.draw
        if message.role is not Role.ASSISTANT:
            return message
        calls = tuple(
            replace(c, arguments=json.dumps(json.loads(c.arguments), sort_keys=True, indent=1))
            for c in message.tool_calls
        )
        thought = d(st.sampled_from([message.reasoning, None, "altered"]))
        return replace(message, text=message.text.strip(), tool_calls=calls, reasoning=thought)

    def act(self) -> None:
        d = self.data.draw
        agent = d(st.sampled_from(self.agents))
        history = [self.replayed(m) for m in agent.messages]
        action = d(st.sampled_from(["go on"] * 5 + ["again", "edit", "compact", "tools", "back"]))
        if action == "edit" and len(history) > 1:
            at = d(st.integers(1, len(history) - 1))
            history[at] = replace(history[at], text=history[at].text + "!")
        elif action == "compact":
            history = [history[0], user("summary")]
        elif action == "tools":
            agent.tools = d(st.sampled_from([(), (Tool(name="f"),), (Tool(name="g"),)]))
        elif action == "back":
            history = history[: d(st.integers(1, len(history)))]
        if action != "again" or history[-1].role is Role.ASSISTANT:
            speakers = [user, tool, tool, system]
            history += [d(st.sampled_from(speakers))(d(words)) for _ in range(d(st.integers(1, 3)))]
        self.ask(agent, history)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from(Thinking), st.integers(1, 12))
def test_prompts_extend_and_each_sampled_token_is_trained_once(
    data: st.DataObject, thinking: Thinking, steps: int
) -> None:
    world = World(data, thinking)
    for _ in range(steps):
        world.act()
    rows = world.session.finish()
    for row in rows:
        check_trajectory(row)
    trained = [
        (float(p), int(t))
        for row in rows
        for p, t in zip(row.logprobs[row.loss_mask], row.token_ids[row.loss_mask], strict=True)
    ]
    nodes = [n for n in world.session.tree.nodes if n.trainable]
    wanted = [(float(p), int(t)) for n in nodes for p, t in zip(n.logprobs, n.sampled, strict=True)]
    assert sorted(trained) == sorted(wanted)
    completed = [row for row in rows if row.status is TrajectoryStatus.COMPLETED]
    assert bool(completed) == bool(wanted)
    check_rows_are_engine_calls(world, completed)
    check_branches_are_recorded(world.session)


def check_rows_are_engine_calls(world: World, rows: list) -> None:
    """Each row starts with what some engine call saw and said, to its last trained token."""
    seen = set(world.engine.values())
    for row in rows:
        end = row.turns[-1].end
        assert tuple(row.token_ids[:end].tolist()) in seen


def check_branches_are_recorded(s: Session) -> None:
    """Of the turns that follow one turn, and of those that begin an agent, one at most has no reason."""
    if all(n.delivered for n in s.tree.nodes):  # a turn does not branch off from one that nobody has
        plain = [(n.parent, n.lineage) for n in s.tree.nodes if n.branch is None]
        assert len(plain) == len(set(plain))

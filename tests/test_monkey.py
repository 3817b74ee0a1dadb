"""Who is hurt next: as planned by the seed, never a second broker node, everyone goes on in the end."""

from __future__ import annotations

from collections import Counter

from headrace.deploy.bench.monkey import Habits, Monkey

ROLES, NODES = ["streams-0", "trainer", "rollout-0"], ["broker-1", "broker-2", "broker-3"]


def strikes(monkey: Monkey, nodes: list[str], seconds: int = 1000) -> list[tuple[float, str, str]]:
    return [
        (t / 10, b.kind, b.name)
        for t in range(10 * seconds)
        for b in monkey.blows(t / 10, ROLES, lambda: nodes)
    ]


def test_a_seed_gives_the_same_blows() -> None:
    assert strikes(Monkey(3), NODES) == strikes(Monkey(3), NODES) != strikes(Monkey(4), NODES)


def test_everybody_is_hit_at_the_pace_that_was_asked_for() -> None:
    found = strikes(Monkey(1, habits=Habits(pause_s=(2.0, 4.0))), NODES)
    hit = Counter(name for _, kind, name in found if kind != "thaw")
    assert set(hit) == {*ROLES, *NODES} and 280 < hit.total() < 400
    assert any(kind == "freeze" for _, kind, _ in found)


def test_no_node_is_hit_while_none_may_be() -> None:
    assert not {name for _, _, name in strikes(Monkey(1), [])} & set(NODES)


def test_no_second_node_is_hit_while_one_is_frozen_even_if_it_looks_well() -> None:
    frozen: set[str] = set()
    for _, kind, name in strikes(Monkey(2, habits=Habits(freeze_share=0.5, node_share=0.9)), NODES, 5000):
        if name in NODES:
            if kind == "thaw":
                frozen.discard(name)
            else:
                assert not frozen
                frozen |= {name} if kind == "freeze" else set()


def test_what_is_frozen_goes_on_unless_it_was_killed_meanwhile() -> None:
    frozen: dict[str, float] = {}
    for at, kind, name in strikes(Monkey(5, habits=Habits(freeze_share=0.4, freeze_s=10.0)), NODES):
        if kind == "freeze":
            assert name not in frozen
            frozen[name] = at
        elif kind == "thaw":
            assert 9.99 <= at - frozen.pop(name) < 10.3
        else:
            frozen.pop(name, None)
    assert len(frozen) <= 4

"""Counters whose labels are a closed set."""

from __future__ import annotations

import re
from pathlib import Path

import headrace.streams
from headrace.streams import metrics


def void(reason: str) -> float:
    value = metrics.REGISTRY.get_sample_value("headrace_scores_void_total", {"reason": reason})
    assert value is not None, reason
    return value


def test_void_scores_are_counted_by_reason_and_a_users_own_word_is_other() -> None:
    before = void("reward_timeout"), void("other")
    metrics.count_score("void", "reward_timeout")
    metrics.count_score("void", "my own word")
    metrics.count_score("void", None)
    metrics.count_score("scored", None)
    assert (void("reward_timeout"), void("other")) == (before[0] + 1, before[1] + 2)


def test_every_reason_of_the_reward_code_has_its_counter() -> None:
    folder = Path(headrace.streams.__path__[0])
    text = "\n".join(path.read_text() for path in [*folder.rglob("*.py")])
    named = set(re.findall(r"(?:RewardError|Outcome\.void)\(\s*\"([a-z_]+)\"", text))
    assert len(named) > 10
    assert named <= set(metrics.VOID_REASONS)

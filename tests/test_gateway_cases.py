"""What a session makes of what clients and engines do, case by case."""

from __future__ import annotations

from gateway_kit import END, answer, call, ids, said, session, user

from headrace.producers.gateway.capture import Outcome
from headrace.schemas.trajectory import check_trajectory


def test_sampled_ids_stay_though_their_text_has_a_shorter_spelling() -> None:
    s = session()
    first = s.begin(call(user("q")))
    sampled = [*ids("h"), *ids("i"), END]
    assert ids("hi") != sampled[:2]
    answer(s, first, sampled, said("hi"))
    second = s.begin(call(user("q"), said("hi"), user("more")))
    assert second.outcome is Outcome.GENERATE
    assert second.prompt_ids[: len(first.prompt_ids) + 3] == (*first.prompt_ids, *sampled)
    answer(s, second, [*ids("ok"), END], said("ok"))
    (row,) = s.finish()
    check_trajectory(row)
    assert row.sampled_tokens == 6

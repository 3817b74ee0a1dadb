"""The outcome join without a broker: what counts, when it settles, and that reading order does not matter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streams_records import a_score

from headrace.schemas.config import FeedbackConfig
from headrace.schemas.config_file import load_config
from headrace.schemas.errors import ConfigError
from headrace.schemas.feedback import Feedback
from headrace.schemas.score import SCORE, Score, ScoreStatus
from headrace.streams.feedback_book import Cause, Fate, FeedbackBook, Forgotten, JoinRule, Settled

WINDOW = 100_000
START = 1_000_000


def an_outcome(name: str = "accepted", value: float = 1.0, *, id: str = "f", event: int = 0) -> Feedback:
    return Feedback(feedback_id=id, rollout_id="r", name=name, value=value, event_ms=event)


def a_book(**fields: Any) -> FeedbackBook:
    config = FeedbackConfig.model_validate(
        {"enabled": True, "window_seconds": WINDOW / 1000, "weights": {"accepted": 1.0}, **fields}
    )
    return FeedbackBook(JoinRule.of(config))


def settled(book: FeedbackBook, horizon: int = START + WINDOW + 1) -> list[Settled]:
    return book.advance(horizon)[0]


def the_score(book: FeedbackBook) -> Score:
    (one,) = settled(book)
    return one.score


def waiting(book: FeedbackBook, reward: float = 0.5, at: int = START, **fields: Any) -> None:
    assert book.add_score(a_score("r", reward, **fields), at)


def test_an_outcome_before_its_trajectory_is_joined() -> None:
    book = a_book()
    book.add_outcome(an_outcome(), START - 50)
    waiting(book)
    (one,) = settled(book, START + 1)
    assert (one.score.reward, one.cause) == (1.0, Cause.OUTCOMES)
    assert json.loads(one.score.components or "") == {"feedback.accepted": 1.0}


def test_the_later_event_time_wins_whichever_came_last() -> None:
    book = a_book(settle="window")
    waiting(book)
    book.add_outcome(an_outcome(value=1.0, id="b", event=20), START + 1)
    book.add_outcome(an_outcome(value=0.0, id="a", event=10), START + 2)
    score = the_score(book)
    assert score.reward == 1.0
    assert json.loads(score.components or "")["feedback.accepted.events"] == 2


def test_equal_event_times_go_by_feedback_id() -> None:
    book = a_book(settle="window")
    waiting(book)
    book.add_outcome(an_outcome(value=3.0, id="b"), START + 1)
    book.add_outcome(an_outcome(value=2.0, id="a"), START + 2)
    assert the_score(book).reward == 3.0


def test_a_duplicate_is_absorbed_and_what_comes_after_the_end_is_late() -> None:
    book = a_book()
    waiting(book)
    assert book.add_outcome(an_outcome(), START + 1) is Fate.TAKEN
    assert book.add_outcome(an_outcome(), START + 2) is Fate.DUPLICATE
    assert the_score(book).reward == 1.0
    assert book.add_outcome(an_outcome(id="g"), START + 9) is Fate.LATE


def test_the_first_outcome_settles_after_the_grace_and_what_is_appended_later_does_not_count() -> None:
    book = a_book(grace_seconds=10)
    waiting(book)
    book.add_outcome(an_outcome(value=1.0, id="a", event=1), START + 1000)
    book.add_outcome(an_outcome(value=2.0, id="b", event=2), START + 11_000)
    book.add_outcome(an_outcome(value=3.0, id="c", event=3), START + 11_001)
    assert settled(book, START + 11_000) == []
    (one,) = settled(book, START + 11_001)
    assert one.score.reward == 2.0


def test_without_outcomes_the_default_or_a_void_score() -> None:
    book = a_book()
    waiting(book)
    assert (the_score(book).status, book.advance(0)) == (ScoreStatus.VOID, ([], []))
    book = a_book(default=-1.0, reward_weight=2.0)
    waiting(book, 0.5)
    (one,) = settled(book)
    assert (one.score.reward, one.cause) == (0.0, Cause.DEFAULT)


def test_signals_are_weighed_and_the_one_named_reward_replaces_all() -> None:
    weights = {"accepted": 1.0, "edited": -0.2}
    book = a_book(weights=weights, reward_weight=0.5)
    waiting(book, 0.5, turn_rewards=(0.2, 0.3))
    book.add_outcome(an_outcome("accepted", 1.0, id="a"), START + 1)
    assert settled(book, START + 2) == []
    book.add_outcome(an_outcome("edited", 2.0, id="b"), START + 2)
    book.add_outcome(an_outcome("seen", 7.0, id="c"), START + 2)
    score = the_score(book)
    assert score.reward == pytest.approx(0.25 + 1.0 - 0.4)
    assert score.turn_rewards == pytest.approx((0.1, 0.15 + 0.6))
    assert json.loads(score.components or "") == {
        "verifier": 0.5,
        "feedback.accepted": 1.0,
        "feedback.edited": 2.0,
        "feedback.seen": 7.0,
    }
    book = a_book(weights=weights, reward_weight=0.5)
    waiting(book)
    book.add_outcome(an_outcome("reward", -3.0), START + 1)
    assert the_score(book).reward == -3.0


def test_outcomes_of_an_unknown_rollout_are_kept_for_the_window_and_then_forgotten() -> None:
    book = a_book()
    book.add_outcome(an_outcome(), START)
    assert book.advance(START + WINDOW) == ([], [])
    assert book.advance(START + WINDOW + 1) == ([], [Forgotten("r", (), ("f",))])
    assert book.nearest_ms is None


def test_a_settled_trajectory_does_not_wait_again_until_it_is_forgotten() -> None:
    book = a_book()
    waiting(book)
    settled(book)
    assert not book.add_score(a_score("r"), START)
    _, forgotten = book.advance(START + 2 * WINDOW + 1)
    assert forgotten == [Forgotten("r", ("r.0",), ())]
    assert not forgotten[0].unknown


def test_a_rollout_of_two_trajectories_waits_for_both_and_they_share_the_reward() -> None:
    book = a_book()
    waiting(book, trajectory_count=2)
    book.add_outcome(an_outcome(), START + 1)
    assert settled(book, START + 50) == []
    waiting(book, at=START + 60, trajectory_count=2, trajectory_index=1)
    found = settled(book, START + 61)
    assert [(s.score.trajectory_id, s.score.reward) for s in found] == [("r.0", 1.0), ("r.1", 1.0)]


def test_signals_whose_sum_is_no_number_make_a_void_score() -> None:
    book = a_book(weights={"accepted": 10.0}, settle="window")
    waiting(book)
    book.add_outcome(an_outcome(value=1e308), START + 1)
    score = the_score(book)
    assert (score.status, score.reason, score.reward) == (ScoreStatus.VOID, "reward_not_finite", None)
    assert SCORE.decode(SCORE.encode(score)).reason == "reward_not_finite"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["accepted", "edited", "reward", "other"]),
        st.floats(-3, 3),
        st.integers(0, 3),
        st.integers(START - 2 * WINDOW, START + 2 * WINDOW),
    ),
    max_size=6,
)


@given(EVENTS, st.data(), st.sampled_from(["first", "window"]), st.booleans())
def test_any_order_of_the_same_records_gives_the_same_scores(
    events: list[tuple[str, float, int, int]], data: st.DataObject, settle: str, void: bool
) -> None:
    def run(order: list[int]) -> list[Settled]:
        book = a_book(
            weights={"accepted": 1.0, "edited": -0.2},
            settle=settle,
            grace_seconds=5,
            default="void" if void else 0.25,
        )
        for i in order:
            if i < 0:
                index = -1 - i
                waiting(book, at=START + 7000 * index, trajectory_index=index, trajectory_count=2)
            else:
                name, value, event, at = events[i]
                book.add_outcome(an_outcome(name, value, id=str(i), event=event), at)
        return book.advance(START + 4 * WINDOW)[0]

    records = [-1, -2, *range(len(events))]
    assert run(data.draw(st.permutations(records))) == run(records)


def test_a_window_longer_than_trajectories_are_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"feedback\.window_seconds"):
        load_config(overrides={"feedback.window_seconds": 7 * 86400})

"""The books on logs made by hand, one fault each: an audit that cannot find it proves nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kafka import TopicPartition

from headrace.deploy import audit_log
from headrace.deploy.audit import Audit, AuditResult
from headrace.schemas.config_file import load_config
from headrace.schemas.weights import BlobKind, WeightBlob, WeightRecord

Change = dict[str, Any]


def version(number: int, *, base_hash: int | None = None, **changes: Any) -> WeightRecord:
    kind = BlobKind.DELTA if number else BlobKind.ANCHOR
    return WeightRecord(
        **{
            "policy_id": "policy",
            "version": number,
            "base_version": number - 1 if number else None,
            "base_hash": (number - 1 if base_hash is None else base_hash) if number else None,
            "weights_hash": number,
            "blobs": (WeightBlob(kind=kind, uri="u", size=1, sha256="0" * 64),),
            **changes,
        }
    )


def books(
    *,
    weights: list[tuple[WeightRecord, list[tuple[int, int]]]] | None = None,
    letters: tuple[tuple[str, int, int], ...] = (),
    ledger: tuple[str, ...] | None = None,
    trajectories: tuple[str | None, ...] = ("a", "b", "c", "d"),
    scores: tuple[str | None, ...] = ("a", "b", "c", "d"),
    samples: tuple[tuple[str | None, str | None], ...] = (
        ("a", None),
        ("b", None),
        ("c", "stale"),
        ("d", "void"),
    ),
    committed: tuple[int, int] = (9, 9),
    expired: dict[str, int] | None = None,
) -> AuditResult:
    """One partition a topic; by default a log that adds up: a, b trained by version 1, c dropped, d void."""
    if weights is None:
        weights = [
            (version(0), []),
            (version(1, consumed=((0, 4),), dropped={"stale": 1, "void": 1}), [(0, 0), (0, 1)]),
        ]
    audit = Audit({"trajectories": {0: committed[0]}, "scores": {0: committed[1]}}, expired=expired)
    for record, places in weights:
        audit.weights(record, places)
    for letter in letters:
        audit.dead_letter(*letter)
    if ledger is not None:
        audit.acknowledged(ledger)
    for offset, name in enumerate(trajectories):
        audit.trajectory(0, offset, name)
    for offset, name in enumerate(scores):
        audit.score(0, offset, name)
    for offset, (name, reason) in enumerate(samples):
        audit.sample(0, offset, name, reason)
    return audit.result()


def test_a_log_that_adds_up() -> None:
    found = books(ledger=("a", "b", "c"))
    assert found.adds_up, found.problems
    assert (found.acknowledged, found.trained, found.dropped, found.void) == (4, 2, 1, 1)
    assert (found.lost, found.trained_twice, found.in_flight, found.versions) == (0, 0, 0, 1)
    assert found.reasons == {"stale": 1, "void": 1} and found.ledger == 3


def test_repeats_of_scores_and_samples_are_normal() -> None:
    repeated = (("a", None), ("a", None), ("b", None), ("c", "stale"), ("d", "void"), ("b", None))
    weights = [
        (version(0), []),
        (
            version(1, consumed=((0, 6),), dropped={"stale": 1, "void": 1, "duplicate": 2}),
            [(0, 0), (0, 2)],
        ),
    ]
    found = books(weights=weights, scores=("a", "a", "b", "c", "d"), samples=repeated)
    assert found.adds_up and found.trained == 2 and found.conflicts == 0


def test_an_acknowledged_trajectory_that_is_not_in_the_log_is_lost() -> None:
    found = books(ledger=("a", "e"))
    assert found.lost == 1 and found.acknowledged == 5
    assert "e was acknowledged" in found.problems[0]


def test_a_committed_trajectory_without_a_score_is_lost() -> None:
    found = books(trajectories=("a", "b", "c", "d", "e"))
    assert found.lost == 1 and "trajectories-0 offset 4" in found.problems[0]


def test_a_committed_score_without_a_sample_is_lost() -> None:
    found = books(trajectories=("a", "b", "c", "d", "e"), scores=("a", "b", "c", "d", "e"))
    assert found.lost == 1 and "scores-0 offset 4" in found.problems[0]


def test_what_a_stage_has_not_come_to_waits() -> None:
    found = books(
        trajectories=("a", "b", "c", "d", "e", "f"),
        scores=("a", "b", "c", "d", "e"),
        samples=(("a", None), ("b", None), ("c", "stale"), ("d", "void")),
        committed=(5, 4),
    )
    assert found.adds_up and found.waiting == {"verify": 1, "advantage": 1}


def test_an_admitted_sample_beyond_the_newest_version_waits_for_the_trainer() -> None:
    more = (("a", None), ("b", None), ("c", "stale"), ("d", "void"), ("e", None))
    found = books(trajectories=tuple("abcde"), scores=tuple("abcde"), samples=more)
    assert found.adds_up and found.waiting == {"trainer": 1}


def test_an_admitted_sample_that_the_trainer_passed_over_is_dropped() -> None:
    weights = [(version(0), []), (version(1, consumed=((0, 4),), dropped={"stale": 2, "void": 1}), [(0, 0)])]
    found = books(weights=weights)
    assert found.adds_up and found.reasons == {"stale": 1, "in_trainer": 1, "void": 1}


@pytest.mark.parametrize("places", [[(0, 0), (0, 1), (0, 0)], [(0, 0), (0, 1), (0, 4)]])
def test_trained_twice(places: list[tuple[int, int]]) -> None:
    """By one sample record named twice, or by a repeat of it."""
    samples = (("a", None), ("b", None), ("c", "stale"), ("d", "void"), ("a", None))
    weights = [(version(0), []), (version(1, consumed=((0, 5),), dropped={"stale": 1, "void": 1}), places)]
    found = books(weights=weights, samples=samples)
    assert found.trained_twice == 1 and found.trained == 2 and not found.adds_up


def test_a_gap_in_the_versions() -> None:
    weights = [
        (version(0), []),
        (version(2, consumed=((0, 4),), dropped={"stale": 1, "void": 1}), [(0, 0), (0, 1)]),
    ]
    found = books(weights=weights)
    assert found.version_gaps == 1 and found.versions == 2 and "version 1 is missing" in found.problems[0]


def test_a_version_that_comes_twice() -> None:
    step = version(1, consumed=((0, 4),), dropped={"stale": 1, "void": 1})
    found = books(weights=[(version(0), []), (step, [(0, 0), (0, 1)]), (version(1, consumed=((0, 4),)), [])])
    assert not found.adds_up and "version 1 comes after version 1" in found.problems[0]


def test_a_version_on_other_weights_than_the_one_before() -> None:
    step = version(1, base_hash=99, consumed=((0, 4),), dropped={"stale": 1, "void": 1})
    found = books(weights=[(version(0), []), (step, [(0, 0), (0, 1)])])
    assert not found.adds_up and "weights of 0" in found.problems[0]


def test_conflicting_fates_the_first_one_counts() -> None:
    late = (("a", None), ("b", None), ("c", "stale"), ("d", "void"), ("a", "stale"))
    weights = [
        (version(0), []),
        (version(1, consumed=((0, 5),), dropped={"stale": 1, "void": 1, "duplicate": 1}), [(0, 0), (0, 1)]),
    ]
    found = books(weights=weights, samples=late)
    assert found.adds_up and found.conflicts == 1 and found.trained == 2


def test_training_against_the_first_fate_is_a_fault() -> None:
    turned = (("a", None), ("b", "stale"), ("c", "stale"), ("d", "void"), ("b", None))
    weights = [
        (version(0), []),
        (version(1, consumed=((0, 5),), dropped={"stale": 2, "void": 1}), [(0, 0), (0, 4)]),
    ]
    found = books(weights=weights, samples=turned)
    assert not found.adds_up and "although their first sample record dropped them: b" in found.problems[0]


def test_drops_that_the_trainer_did_not_count() -> None:
    weights = [(version(0), []), (version(1, consumed=((0, 4),), dropped={"void": 1}), [(0, 0), (0, 1)])]
    found = books(weights=weights)
    assert not found.adds_up and "1 differ" in found.problems[0]


def test_a_dead_letter_accounts_for_a_record_that_cannot_be_read() -> None:
    letters = (("trajectories", 0, 4), ("trajectories", 0, 5))
    found = books(letters=letters, trajectories=("a", "b", "c", "d", None, "f"))
    assert found.adds_up and found.deadlettered == 2 and found.acknowledged == 6
    assert books(trajectories=("a", "b", "c", "d", None)).lost == 1


def test_a_sample_that_cannot_be_read_must_be_a_dead_letter() -> None:
    samples = (("a", None), ("b", None), ("c", "stale"), ("d", "void"), (None, None))
    assert books(samples=samples, letters=(("samples", 0, 4),)).adds_up
    assert "samples-0 offset 4" in books(samples=samples).problems[0]


def test_trained_sample_records_that_are_not_in_the_log() -> None:
    weights = [
        (version(0), []),
        (version(1, consumed=((0, 4),), dropped={"stale": 1, "void": 1}), [(0, 0), (0, 1), (0, 7)]),
    ]
    found = books(weights=weights)
    assert not found.adds_up and "not in the log: (0, 7)" in found.problems[0]


def test_training_of_an_unknown_trajectory_is_a_fault() -> None:
    found = books(trajectories=("a", "c", "d"), scores=("a", "c", "d"))
    assert not found.adds_up and "b was trained" in found.problems[0]


def test_what_retention_removed_is_no_loss_but_is_told() -> None:
    found = books(trajectories=("a", "b", "c", "d", "e"), expired={"scores": 3})
    assert found.adds_up and found.lost == 0 and found.reasons["expired"] == 1
    assert found.notes == ("retention has removed 3 records of scores",)


@pytest.mark.parametrize(
    ("settings", "known"),
    [({}, {0: 5}), ({"feedback.enabled": True}, {}), ({"feedback.signals": ["accepted"]}, {})],
)
def test_what_waits_for_outcomes_is_not_lost_however_feedback_was_switched_on(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], known: dict[int, int]
) -> None:
    consumer = SimpleNamespace(committed=lambda tp: 5, close=lambda: None)
    monkeypatch.setattr(audit_log, "make_consumer", lambda *args, **kwargs: consumer)
    monkeypatch.setattr(audit_log, "partitions_of", lambda consumer, topic: [TopicPartition(topic, 0)])
    books: Any = audit_log._Books(load_config(overrides=settings), consumer, print)  # type: ignore[arg-type]
    assert books._committed() == {"trajectories": known, "scores": {0: 5}}

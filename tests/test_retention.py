"""What may be deleted of a policy's versions: never what an engine, the trainer or an audit may still need."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from headrace.schemas.engine import EngineState, EngineStatus
from headrace.schemas.weights import BlobKind, WeightBlob, WeightRecord
from headrace.streams.retention import Plan, plan_cleanup


def blob(version: int, kind: BlobKind, size: int = 10) -> WeightBlob:
    return WeightBlob(kind=kind, uri=f"weights/p/v{version:06d}-{kind}-aa", size=size, sha256="a" * 64)


def log(newest: int, every: int = 20, *, samples: Iterable[int] = ()) -> list[WeightRecord]:
    """Versions 0 to `newest`, an anchor each `every`, lists of samples in blobs for `samples`."""
    records = []
    for v in range(newest + 1):
        blobs = [blob(v, BlobKind.DELTA)] if v else []
        blobs += [blob(v, BlobKind.ANCHOR, 1000)] if v % every == 0 else []
        blobs += [blob(v, BlobKind.SAMPLES)] if v in samples else []
        records.append(
            WeightRecord(
                policy_id="p",
                version=v,
                base_version=v - 1 if v else None,
                base_hash=v - 1 if v else None,
                weights_hash=v,
                blobs=tuple(blobs),
            )
        )
    return records


def everything(records: list[WeightRecord]) -> dict[str, int]:
    return {b.uri: b.size for r in records for b in r.blobs}


def engine(
    version: int, latest: int | None = None, *, age: float = 1.0, **fields: object
) -> tuple[EngineStatus, float]:
    state = fields.pop("state", EngineState.IDLE)
    status = EngineStatus(
        engine_id="e",
        policy_id=str(fields.pop("policy_id", "p")),
        state=EngineState(str(state)),
        version=version,
        latest_version=version if latest is None else latest,
    )
    return status, age


def deleted(plan: Plan) -> dict[BlobKind, list[int]]:
    found: dict[BlobKind, list[int]] = {BlobKind.ANCHOR: [], BlobKind.DELTA: [], BlobKind.SAMPLES: []}
    for version, b in plan.delete:
        found[b.kind].append(version)
    return found


def test_all_before_the_second_newest_anchor_goes() -> None:
    records = log(45)
    plan = plan_cleanup(records, everything(records), [])
    assert plan.floor == 20 and plan.bytes == 19 * 10 + 1000
    assert deleted(plan)[BlobKind.ANCHOR] == [0] and deleted(plan)[BlobKind.DELTA] == list(range(1, 20))


def test_more_anchors_may_be_kept_and_never_fewer_than_two() -> None:
    records = log(45)
    assert plan_cleanup(records, everything(records), [], keep_anchors=3).delete == ()
    with pytest.raises(ValueError, match="use 2 or more"):
        plan_cleanup(records, everything(records), [], keep_anchors=1)


def test_with_too_few_anchors_everything_stays() -> None:
    records = log(19)
    plan = plan_cleanup(records, everything(records), [])
    assert plan.floor is None and plan.delete == ()


def test_an_anchor_that_is_not_whole_in_the_store_does_not_count() -> None:
    records = log(45)
    present = everything(records)
    del present["weights/p/v000040-anchor-aa"]
    assert plan_cleanup(records, present, []).floor == 0
    present["weights/p/v000040-anchor-aa"] = 999
    assert plan_cleanup(records, present, []).floor == 0


def test_what_is_gone_already_is_not_deleted_again() -> None:
    records = log(45)
    present = everything(records)
    del present["weights/p/v000007-delta-aa"]
    assert 7 not in deleted(plan_cleanup(records, present, []))[BlobKind.DELTA]


def test_a_live_engine_keeps_the_deltas_behind_its_version() -> None:
    records = log(65)
    plan = plan_cleanup(records, everything(records), [engine(12, 65)])
    assert plan.floor == 40
    assert deleted(plan)[BlobKind.DELTA] == list(range(1, 13)) and deleted(plan)[BlobKind.ANCHOR] == [0, 20]
    (hold,) = plan.holds
    assert "engine e" in hold.why and "version 12" in hold.why and (hold.blobs, hold.bytes) == (27, 270)


def test_an_engine_that_was_told_of_older_anchors_alone_keeps_them() -> None:
    records = log(105)
    plan = plan_cleanup(records, everything(records), [engine(-1, 45)])
    assert plan.floor == 80
    assert deleted(plan)[BlobKind.ANCHOR] == [0] and deleted(plan)[BlobKind.DELTA] == list(range(1, 21))


def test_a_poisoned_engine_needs_anchors_and_not_the_way_on_from_what_is_torn() -> None:
    records = log(65)
    plan = plan_cleanup(records, everything(records), [engine(12, 65, state=EngineState.POISONED)])
    assert deleted(plan)[BlobKind.DELTA] == list(range(1, 40)) and plan.holds == ()


@pytest.mark.parametrize(
    "gone",
    [
        engine(12, state=EngineState.STOPPED),
        engine(12, age=3601.0),
        engine(12, policy_id="another"),
        engine(-1),
        engine(64),
    ],
)
def test_who_is_gone_or_new_or_near_the_newest_holds_nothing(gone: tuple[EngineStatus, float]) -> None:
    records = log(65)
    assert plan_cleanup(records, everything(records), [gone]) == plan_cleanup(
        records, everything(records), []
    )


def test_a_version_that_is_to_be_kept_stays_reachable() -> None:
    records = log(65)
    found = deleted(plan_cleanup(records, everything(records), [], keep_versions=[25, 25]))
    assert found[BlobKind.ANCHOR] == [0]
    assert found[BlobKind.DELTA] == [*range(1, 21), *range(26, 40)]


def test_lists_of_samples_stay_for_the_audit_and_for_redoing_steps() -> None:
    records = log(45, samples=range(1, 46))
    assert deleted(plan_cleanup(records, everything(records), []))[BlobKind.SAMPLES] == []


def test_a_blob_that_a_kept_version_names_too_stays() -> None:
    records = log(45)
    shared = records[0].blobs
    records[40] = WeightRecord(
        policy_id="p", version=40, base_version=None, base_hash=None, weights_hash=0, blobs=shared
    )
    plan = plan_cleanup(records, everything(records), [])
    assert deleted(plan)[BlobKind.ANCHOR] == []


def test_what_no_record_names_is_told_and_not_deleted_and_the_next_version_may_be_on_its_way() -> None:
    records = log(45)
    present = everything(records) | {
        "weights/p/v000031-delta-bb": 5,
        "weights/p/v000046-delta-bb": 6,
        "weights/p/else": 7,
    }
    plan = plan_cleanup(records, present, [])
    assert plan.unknown == {"weights/p/v000031-delta-bb": 5, "weights/p/else": 7}
    assert not {b.uri for _, b in plan.delete} & plan.unknown.keys()


@pytest.mark.parametrize("newest", [0, 1, 19, 20, 39, 40, 41, 77])
@pytest.mark.parametrize("at", [-1, 0, 12, 20, 35, 60])
def test_after_any_cleanup_the_trainer_and_each_live_engine_reach_the_newest_version(
    newest: int, at: int
) -> None:
    at = min(at, newest)
    records = log(newest)
    plan = plan_cleanup(records, everything(records), [engine(at, newest)])
    left = everything(records).keys() - {b.uri for _, b in plan.delete}

    def has(version: int, kind: BlobKind) -> bool:
        return blob(version, kind).uri in left

    anchors = [v for v in range(newest + 1) if has(v, BlobKind.ANCHOR)]
    assert len(anchors) >= min(2, newest // 20 + 1)
    assert all(has(v, BlobKind.DELTA) for v in range(anchors[-1] + 1, newest + 1))
    if at >= 0:
        assert all(has(v, BlobKind.DELTA) for v in range(at + 1, newest + 1))

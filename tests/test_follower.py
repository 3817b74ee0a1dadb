"""Which way leads on: chain or anchor, by how far and how many bytes; what is waited for, gone around or given up."""

from headrace.producers.engines.follower import Follower, FollowRule, Trouble
from headrace.schemas.weights import BlobKind, WeightBlob, WeightRecord


def record(version, *, anchor=0, delta=10, base=None, hash_=None) -> WeightRecord:
    """Version `version` with blobs of so many bytes; 0: without."""
    sizes = {BlobKind.ANCHOR: anchor, BlobKind.DELTA: delta if version else 0}
    return WeightRecord(
        policy_id="p",
        version=version,
        base_version=version - 1 if sizes[BlobKind.DELTA] else None,
        base_hash=1000 + version - 1 if base is None else base,
        weights_hash=1000 + version if hash_ is None else hash_,
        blobs=tuple(
            WeightBlob(kind=k, uri=f"{version}-{k}", size=n, sha256="0" * 64) for k, n in sizes.items() if n
        ),
    )


def topic(end: int, *, anchors: dict[int, int], delta: int = 10) -> list[WeightRecord]:
    return [record(v, anchor=anchors.get(v, 0), delta=delta) for v in range(end + 1)]


def live_at(version: int, records, **rule) -> Follower:
    """A follower that went live there and then saw the rest."""
    f = Follower(FollowRule(**rule))
    for r in records[: version + 1]:
        f.see(r)
    f.live(records[version])
    for r in records[version + 1 :]:
        f.see(r)
    return f


def versions(route) -> list[int]:
    return [r.version for r in route.records]


def test_a_chain_of_small_deltas_is_taken_past_an_anchor_and_a_long_one_is_not():
    near = live_at(5, topic(12, anchors={0: 500, 10: 500}))
    assert versions(near.next(0.0)) == list(range(6, 13)) and not near.next(0.0).from_anchor
    assert near.next(0.0).bytes_to_fetch == 70
    far = live_at(5, topic(80, anchors={0: 500, 20: 500, 40: 500, 60: 500, 70: 500}))
    assert far.next(0.0).from_anchor and versions(far.next(0.0)) == list(range(70, 81))
    assert far.next(0.0).bytes_to_fetch == 600


def test_the_cheaper_of_two_anchors_counts_too():
    f = Follower()
    for r in topic(12, anchors={0: 100, 10: 900}):
        f.see(r)
    route = f.next(0.0)
    assert route.from_anchor and versions(route) == list(range(13)) and route.bytes_to_fetch == 220


def test_a_chain_that_takes_several_pauses_is_judged_by_all_of_its_bytes():
    f = live_at(0, topic(60, anchors={0: 500, 59: 500}), max_chain=8)
    assert f.next(0.0).from_anchor and versions(f.next(0.0)) == [59, 60]
    f = live_at(0, topic(30, anchors={0: 500, 29: 500}), max_chain=8)
    assert versions(f.next(0.0)) == list(range(1, 9))


def test_what_leads_on_from_the_live_version_is_remembered_however_many_anchors_pass():
    f = live_at(3, topic(50, anchors={v: 10_000 for v in range(0, 51, 10)}))
    assert versions(f.next(0.0))[0] == 4
    f.live(record(45))
    assert f.next(0.0) is not None and min(f._records) == 40


def test_a_store_that_hiccups_is_waited_for_one_that_stays_away_is_gone_around():
    f = live_at(5, topic(12, anchors={0: 500, 10: 500}))
    for attempt in range(3):
        f.failed(6, BlobKind.DELTA, float(attempt * 10), Trouble.AWAY)
        assert f.next(attempt * 10.0) is None
    f.failed(6, BlobKind.DELTA, 30.0, Trouble.AWAY)
    assert f.next(30.0).from_anchor and f.next(30.0).records[0].version == 10
    for attempt in range(40):
        f.failed(6, BlobKind.DELTA, 100.0 * attempt, Trouble.AWAY)
    assert not f.next(100.0 * 39 + 5.0).from_anchor, "it is asked for ever, every few seconds"


def test_a_blob_that_is_gone_sends_to_the_anchor_at_once():
    f = live_at(12, topic(21, anchors={0: 500, 20: 500}))
    assert versions(f.next(0.0))[0] == 13
    f.failed(13, BlobKind.DELTA, 0.0, Trouble.GONE)
    assert f.next(0.0).from_anchor and versions(f.next(0.0)) == [20, 21]


def test_a_lost_blob_is_looked_for_again_after_a_while_and_a_bad_one_never():
    f = live_at(0, topic(1, anchors={0: 500}))
    for _ in range(4):
        f.failed(1, BlobKind.DELTA, 0.0, Trouble.GONE)
    assert f.next(59.0) is None and "cannot be used" in f.stuck()
    assert versions(f.next(60.0)) == [1]
    f.failed(1, BlobKind.DELTA, 60.0, Trouble.BAD)
    assert f.next(1e12) is None and "delta of version 1 cannot be used" in f.stuck()


def test_the_part_of_a_chain_before_what_is_waited_for_is_taken():
    f = live_at(0, topic(5, anchors={0: 500}))
    f.failed(4, BlobKind.DELTA, 0.0, Trouble.AWAY)
    assert versions(f.next(0.0)) == [1, 2, 3]
    assert versions(f.next(0.25)) == [1, 2, 3, 4, 5]


def test_torn_weights_take_the_first_anchor_that_is_there_whatever_it_costs():
    f = live_at(12, topic(12, anchors={0: 100, 10: 900}))
    f.torn()
    f.failed(0, BlobKind.ANCHOR, 0.0, Trouble.AWAY)
    assert versions(f.next(0.0)) == [10, 11, 12]


def test_a_missing_record_is_named_until_it_is_seen_or_an_anchor_leads_past_it():
    records = topic(9, anchors={0: 500, 9: 500})
    f = Follower()
    for r in records[:6]:
        f.see(r)
    f.live(records[5])
    assert f.missing is None
    f.see(records[7])
    assert f.next(0.0) is None and f.missing == 6 and f.latest == 7
    assert "version 6 is not on the topic, 7 is" in f.stuck()
    f.see(records[9])
    assert f.missing is None and versions(f.next(0.0)) == [9]
    f.see(records[6])
    assert f.missing is None and versions(f.next(0.0)) == [9], "it gets further than 6 and 7"


def test_a_huge_gap_costs_nothing():
    f = live_at(0, topic(0, anchors={0: 500}))
    f.see(record(2**60))
    assert f.next(0.0) is None and f.missing == 1 and f.latest == 2**60
    assert "version 1 is not on the topic" in f.stuck()


def test_a_second_record_of_a_version_is_told_apart_by_its_hash():
    f = live_at(5, topic(5, anchors={0: 500}))
    assert f.see(record(5)) is None
    said = f.see(record(5, hash_=7))
    assert "two records of version 5" in said and f"{7:016x}" in said
    f.live(record(5))
    f.see(record(6, base=7))
    assert f.next(0.0) is None and "other weights than are live" in f.stuck()


def test_a_topic_that_begins_anew_is_told_even_where_its_old_beginning_is_forgotten():
    records = topic(60, anchors={v: 500 for v in range(0, 61, 10)})
    f = live_at(60, records)
    assert 0 not in f._records
    assert f.see(records[0]) is None and 0 not in f._records
    assert "begins anew" in f.see(record(0, anchor=500, hash_=3))
    assert f.next(0.0) is None and f.version == 60

"""Where a checkpoint's tensors lie in an engine's fused, cut parameters; checked, written and read back without vLLM."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.producers.engines.vllm.accounts import check_spans
from headrace.producers.engines.vllm.fusing import (
    Columns,
    Experts,
    Piece,
    Plain,
    Stacked,
    name_map,
    uncovered,
)
from headrace.producers.engines.vllm.handover import read_update, write_update
from headrace.producers.engines.vllm.live import LiveShard
from headrace.producers.engines.vllm.places import locate
from headrace.producers.engines.vllm.shards import box_hash, combined_hash
from headrace.schemas.dtypes import Dtype
from headrace.schemas.errors import EngineError, WeightUpdateError
from headrace.schemas.trajectory import VersionSpan
from headrace.schemas.update import TensorPatch, WeightUpdate
from headrace.schemas.weight_hash import set_hash, tensor_hash

H, I, E, V, PADDED = 6, 8, 3, 10, 5  # noqa: E741
SHAPES = {
    "embed.weight": (V, H),
    "a.q_proj.weight": (8, H),
    "a.k_proj.weight": (4, H),
    "a.v_proj.weight": (4, H),
    "a.o_proj.weight": (H, 8),
    "norm.weight": (H,),
    "mlp.experts.gate_up_proj": (E, 2 * I, H),
    "mlp.experts.down_proj": (E, H, I),
}
PER_EXPERT = {
    f"mlp.experts.{e}.{leaf}.weight": (I, H) for e in range(E) for leaf in ("gate_proj", "up_proj")
} | {f"mlp.experts.{e}.down_proj.weight": (H, I) for e in range(E)}


def rank_of(
    rank: int = 0, ranks: int = 1, *, kv_replicas: int = 1, dtype=torch.float32, **shard
) -> LiveShard:
    """A model of one fused attention, experts with padded rows, a norm and a tied embedding, as one rank holds it."""
    q, kv, inner = 8 // ranks, 4 * kv_replicas // ranks, I // ranks
    kv_rank = rank // kv_replicas
    padded = inner + 1
    layers = [
        *(
            Stacked(
                parameter="embed",
                leaf="weight",
                pieces=(Piece(name=n, rows=V, low=rank * V // ranks, high=(rank + 1) * V // ranks),),
                rest=(H,),
            )
            for n in ("embed", "lm_head")
        ),
        Stacked(
            parameter="qkv",
            leaf="weight",
            pieces=(
                Piece(name="a.q_proj", rows=8, low=rank * q, high=(rank + 1) * q),
                Piece(name="a.k_proj", rows=4, low=kv_rank * kv, high=(kv_rank + 1) * kv),
                Piece(name="a.v_proj", rows=4, low=kv_rank * kv, high=(kv_rank + 1) * kv),
            ),
            rest=(H,),
        ),
        Columns(parameter="o", name="a.o_proj.weight", rows=H, columns=8, low=rank * q, high=(rank + 1) * q),
        Plain(parameter="norm", name="norm.weight", shape=(H,)),
        Experts(
            w13="w13",
            w2="w2",
            name="mlp.experts",
            experts=E,
            hidden=H,
            intermediate=I,
            low=rank * inner,
            high=(rank + 1) * inner,
            padded=padded,
        ),
    ]
    storage = {
        "embed": torch.zeros(V // ranks + 3, H, dtype=dtype),  # vLLM pads the vocabulary
        "qkv": torch.zeros(q + 2 * kv, H, dtype=dtype),
        "o": torch.zeros(H, q, dtype=dtype),
        "norm": torch.zeros(H, dtype=dtype),
        "w13": torch.zeros(E, 2 * padded, H, dtype=dtype),
        "w2": torch.zeros(E, H, padded, dtype=dtype),
    }
    return LiveShard(storage, layers, **shard)


def bits(shapes, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.integers(1, 1 << 16, s).astype(np.uint16) for n, s in shapes.items()}


def patch(name: str, shape, indices=None, values=None, dtype: Dtype = Dtype.BF16) -> TensorPatch:
    if indices is not None:
        indices = np.array(indices, dtype=np.int64)
    return TensorPatch(
        name=name, shape=tuple(shape), indices=indices, bits=np.asarray(values, dtype=dtype.bits), dtype=dtype
    )


def anchor(weights, version: int = 0, **more) -> WeightUpdate:
    patches = tuple(patch(n, b.shape, None, b.reshape(-1), **more) for n, b in weights.items())
    return WeightUpdate(version=version, patches=patches, weights_hash=0)


def delta(*patches: TensorPatch, version: int = 1) -> WeightUpdate:
    return WeightUpdate(version=version, base_version=version - 1, patches=patches, weights_hash=0)


def apply(shard: LiveShard, update: WeightUpdate) -> LiveShard:
    shard.write(shard.prepare(update))
    return shard


def hash_of(*ranks: LiveShard) -> int:
    said = []
    for shard in ranks:
        tensors = []
        for name, (shape, dtype) in shard.known.items():
            boxes = [
                [b.low, b.high, str(box_hash(shape, b.low, b.high, v, dtype))] for b, v in shard.read(name)
            ]
            tensors.append([name, shape, dtype.value, boxes])
        said.append(tensors)
    return combined_hash(said)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("experts", ["stacks", "one by one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_back_and_hashes_like_the_checkpoint(ranks, experts, dtype):
    shapes = (
        SHAPES
        if experts == "stacks"
        else {n: s for n, s in SHAPES.items() if "experts" not in n} | PER_EXPERT
    )
    weights = bits(shapes)
    shards = [apply(rank_of(r, ranks, dtype=dtype), anchor(weights)) for r in range(ranks)]
    assert hash_of(*shards) == set_hash(weights)
    changes = []
    for name, new in bits(shapes, 1).items():
        indices = np.flatnonzero(np.random.default_rng(2).random(new.size) < 0.4)
        changes.append(patch(name, new.shape, indices, new.reshape(-1)[indices]))
        weights[name].reshape(-1)[indices] = new.reshape(-1)[indices]
    for shard in shards:
        apply(shard, delta(*changes)).verify(delta(*changes))
        shard.verify(anchor(weights))
    assert hash_of(*shards) == set_hash(weights)


def test_ranks_that_hold_the_same_key_heads_must_agree():
    weights = bits(SHAPES)
    shards = [apply(rank_of(r, 2, kv_replicas=2), anchor(weights)) for r in range(2)]
    assert hash_of(*shards) == set_hash(weights)
    shards[1].storage["qkv"].view(torch.int32)[-1, 0] ^= 1 << 16
    with pytest.raises(WeightUpdateError, match="two ranks"):
        hash_of(*shards)


def test_a_rank_that_is_missing_is_noticed():
    shard = apply(rank_of(0, 2), anchor(bits(SHAPES)))
    with pytest.raises(WeightUpdateError, match="elements are held"):
        hash_of(shard)


def test_the_fused_matrix_is_what_a_loader_makes_of_it():
    weights = bits(SHAPES)
    shard = apply(rank_of(), anchor(weights))
    wide = {n: torch.from_numpy(b.astype(np.uint32).view(np.int32) << 16) for n, b in weights.items()}
    got = {n: t.view(torch.int32) for n, t in shard.storage.items()}
    names = ("a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight")
    assert torch.equal(got["qkv"], torch.cat([wide[n] for n in names]))
    gate_up = wide["mlp.experts.gate_up_proj"]
    assert torch.equal(got["w13"][:, :I], gate_up[:, :I]) and torch.equal(
        got["w13"][:, I + 1 : -1], gate_up[:, I:]
    )
    assert torch.equal(got["w2"][:, :, :I], wide["mlp.experts.down_proj"])
    assert not got["w13"][:, I].any() and not got["w2"][:, :, I].any() and not got["embed"][V:].any()


def test_a_changed_q_leaves_the_rows_of_k_and_v_as_they_are():
    shard = apply(rank_of(), anchor(bits(SHAPES)))
    before = shard.storage["qkv"].clone()
    apply(shard, delta(patch("a.q_proj.weight", (8, H), [0, 47], [1, 2])))
    after = shard.storage["qkv"]
    assert torch.equal(after[8:].view(torch.int32), before[8:].view(torch.int32))
    assert (after.view(torch.int32) != before.view(torch.int32)).sum() == 2


@pytest.mark.parametrize(
    "names", [("embed.weight",), ("lm_head.weight",), ("embed.weight", "lm_head.weight")]
)
def test_a_tied_tensor_may_be_listed_under_either_name_or_both(names):
    weights = bits(SHAPES)
    shard = apply(rank_of(), anchor(weights))
    change = delta(*(patch(n, (V, H), [3, 7], [11, 12]) for n in names))
    apply(shard, change).verify(change)
    weights["embed.weight"].reshape(-1)[[3, 7]] = [11, 12]
    assert hash_of(shard) == set_hash(weights)


def test_an_anchor_may_list_both_names_of_a_tied_tensor_or_the_other_one():
    weights = bits(SHAPES)
    both = weights | {"lm_head.weight": weights["embed.weight"]}
    assert hash_of(apply(rank_of(), anchor(both))) == set_hash(both)
    other = {("lm_head.weight" if n == "embed.weight" else n): b for n, b in weights.items()}
    assert hash_of(apply(rank_of(), anchor(other))) == set_hash(other)


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("unknown_tensor", {"name": "a.q_porj.weight"}),
        ("shape", {"shape": (H, 8)}),
        ("positions", {"indices": np.array([1, 48])}),
        ("positions", {"indices": np.array([-1, 4])}),
        ("positions", {"indices": np.array([4, 4])}),
        ("positions", {"indices": np.array([5, 4])}),
        ("positions", {"indices": np.array([4])}),
        ("positions", {"indices": np.array([4, 5], dtype=np.int32)}),
        ("size", {"indices": None}),
        ("dtype", {"dtype": Dtype.FP16}),
        ("dtype", {"dtype": Dtype.FP32, "bits": np.array([1, 2], dtype=np.uint32)}),
        ("dtype", {"bits": np.array([1, 2], dtype=np.uint32)}),
    ],
)
def test_an_update_with_one_bad_tensor_is_refused_whole(reason, changed):
    shard = apply(rank_of(), anchor(bits(SHAPES)))
    before = {n: t.clone() for n, t in shard.storage.items()}
    good = patch("norm.weight", (H,), [1], [7])
    bad = dataclasses.replace(patch("a.q_proj.weight", (8, H), [1, 2], [7, 8]), **changed)
    with pytest.raises(WeightUpdateError) as e:
        shard.prepare(delta(good, bad))
    assert e.value.reason == reason
    if reason == "unknown_tensor":
        assert "a.q_proj.weight" in e.value.detail
    assert all(
        torch.equal(before[n].view(torch.int32), t.view(torch.int32)) for n, t in shard.storage.items()
    )


def test_other_refusals():
    weights = bits(SHAPES)
    shard = rank_of()
    with pytest.raises(WeightUpdateError, match="before the first anchor"):
        shard.prepare(delta(patch("norm.weight", (H,), [1], [7])))
    with pytest.raises(WeightUpdateError, match=r"a\.k_proj\.weight"):
        shard.prepare(anchor({n: b for n, b in weights.items() if n != "a.k_proj.weight"}))
    with pytest.raises(WeightUpdateError, match="more than once"):
        shard.prepare(
            anchor(
                weights | {"mlp.experts.0.up_proj.weight": bits(PER_EXPERT)["mlp.experts.0.up_proj.weight"]}
            )
        )
    apply(shard, anchor(weights))
    same = patch("norm.weight", (H,), [1], [7])
    for twins, reason in (
        ((same, same), "duplicate_tensor"),
        (
            (patch("embed.weight", (V, H), [1], [7]), patch("lm_head.weight", (V, H), [1], [8])),
            "tied_tensors",
        ),
    ):
        with pytest.raises(WeightUpdateError) as e:
            shard.prepare(delta(*twins))
        assert e.value.reason == reason
    with pytest.raises(WeightUpdateError, match="2 on top of 0"):
        shard.prepare(delta(same, version=3))
    late = shard.prepare(delta(same))
    apply(shard, delta(same))
    with pytest.raises(WeightUpdateError, match="0 on top of 1"):
        shard.write(late)
    with pytest.raises(WeightUpdateError) as e:
        rank_of(dtype=torch.bfloat16).prepare(
            anchor({n: b.astype(np.uint32) for n, b in weights.items()}, dtype=Dtype.FP32)
        )
    assert e.value.reason == "dtype"


def test_a_write_that_fails_half_way_leaves_torn_weights_that_only_an_anchor_mends():
    shard = apply(rank_of(), anchor(bits(SHAPES)))
    change = shard.prepare(
        delta(patch("norm.weight", (H,), [1], [7]), patch("a.q_proj.weight", (8, H), [1], [7]))
    )
    held = shard.storage.pop("qkv")
    with pytest.raises(KeyError):
        shard.write(change)
    shard.storage["qkv"] = held
    assert shard.torn
    with pytest.raises(WeightUpdateError, match="anchor must come first"):
        shard.write(shard.prepare(delta(patch("norm.weight", (H,), [1], [7]))))
    weights = bits(SHAPES, 3)
    apply(shard, anchor(weights, 5))
    assert not shard.torn and shard.version == 5 and hash_of(shard) == set_hash(weights)


def test_weights_that_are_not_what_was_written_are_noticed():
    shard = apply(rank_of(), anchor(bits(SHAPES)))
    change = delta(patch("a.v_proj.weight", (4, H), [2, 9], [5, 6]))
    apply(shard, change).verify(change)
    shard.storage["qkv"].view(torch.int32).view(-1)[12 * H + 9] ^= 1 << 20
    with pytest.raises(WeightUpdateError, match=r"live_bits|1 elements differ"):
        shard.verify(change)


@pytest.mark.parametrize("dtype", [Dtype.FP16, Dtype.FP32])
def test_float32_storage_takes_every_format(dtype):
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal(s).astype(np.float16).view(np.uint16) for n, s in SHAPES.items()}
    if dtype is Dtype.FP32:
        weights = {n: rng.integers(0, 1 << 32, s, dtype=np.uint32) for n, s in SHAPES.items()}
    update = anchor(weights, dtype=dtype)
    shard = apply(rank_of(), update)
    shard.verify(update)
    assert hash_of(shard) == set_hash(weights, dtypes=dict.fromkeys(weights, dtype))


def test_what_the_map_does_not_know_goes_to_the_loader_whole():
    loaded: list[dict[str, torch.Tensor]] = []
    weights = bits(SHAPES | {"odd.weight": (3, 2)})
    shard = apply(rank_of(load=lambda tensors: loaded.append(dict(tensors))), anchor(weights))
    change = patch("odd.weight", (3, 2), [1, 5], [0x3F80, 0x4000])
    apply(shard, delta(change)).verify(delta(change))
    weights["odd.weight"].reshape(-1)[[1, 5]] = change.bits
    assert (
        len(loaded) == 2
        and set(loaded[1]) == {"odd.weight"}
        and loaded[1]["odd.weight"].dtype is torch.bfloat16
    )
    assert np.array_equal(
        loaded[1]["odd.weight"].view(torch.int16).numpy().view(np.uint16), weights["odd.weight"]
    )
    assert hash_of(shard) == set_hash(weights)
    with pytest.raises(WeightUpdateError, match="odd2"):
        shard.prepare(delta(dataclasses.replace(change, name="odd2.weight"), version=2))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_element_lies_in_exactly_one_place_over_all_ranks(data):
    ranks = data.draw(st.sampled_from([1, 2]))
    maps = [rank_of(r, ranks).places for r in range(ranks)]
    name = data.draw(st.sampled_from(sorted(n for n in maps[0] if n != "norm.weight")))  # every rank has that
    shape = maps[0][name].shape
    total = int(np.prod(shape))
    indices = np.array(sorted(data.draw(st.sets(st.integers(0, total - 1)))), dtype=np.int64)
    seen = []
    for rank, places in enumerate(maps):
        for block, positions, chosen in locate(places[name], indices):
            assert len(set(positions.tolist())) == len(positions)
            held = rank_of(rank, ranks).storage[block.parameter]
            assert ((positions >= 0) & (positions < held.numel())).all()
            seen += indices[chosen].tolist()
    assert sorted(seen) == indices.tolist()


def test_boxes_add_up_to_the_hash_of_the_tensor():
    whole = bits({"t": (4, 6, 5)})["t"]
    parts = [((0, 0, 0), (4, 6, 2)), ((0, 0, 2), (4, 3, 5)), ((0, 3, 2), (4, 6, 5))]
    total = 0
    for low, high in parts:
        box = whole[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
        total += box_hash(whole.shape, low, high, box, Dtype.BF16)
    assert total % 2**64 == tensor_hash(whole)
    scalar = np.array([7], dtype=np.uint16)
    assert box_hash((), (), (), scalar.reshape(()), Dtype.BF16) == tensor_hash(scalar)


def test_an_update_survives_the_handover_and_a_changed_file_is_refused(tmp_path):
    update = delta(patch("n", (H,), [1, 3], [5, 6]), patch("w", (2, 2), None, [1, 2, 3, 4], dtype=Dtype.FP32))
    digest = write_update(tmp_path / "u", update)
    again = read_update(tmp_path / "u", digest)
    assert (again.version, again.base_version) == (1, 0)
    for a, b in zip(again.patches, update.patches, strict=True):
        assert (a.name, a.shape, a.dtype) == (b.name, b.shape, b.dtype) and np.array_equal(a.bits, b.bits)
        assert (a.indices is None) == (b.indices is None) and (
            a.indices is None or np.array_equal(a.indices, b.indices)
        )
    with pytest.raises(FileExistsError):
        write_update(tmp_path / "u", update)
    data = bytearray((tmp_path / "u").read_bytes())
    data[-70] ^= 1
    (tmp_path / "u").write_bytes(data)
    with pytest.raises(WeightUpdateError, match="not the file"):
        read_update(tmp_path / "u", digest)
    with pytest.raises(WeightUpdateError, match="handover"):
        read_update(tmp_path / "gone", digest)


def spans(*given: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in given)


def test_two_accounts_of_the_versions_must_agree():
    check_spans(spans((0, 0, 5), (1, 5, 9)), [(0, 5)], 9, exact=True)
    check_spans(spans((1, 0, 9)), [(0, 0)], 9, exact=True)
    # a version without changes came in between, without a pause
    check_spans(spans((0, 0, 3), (1, 3, 5), (2, 5, 9)), [(1, 5)], 9, exact=True)
    check_spans(spans((0, 0, 6), (1, 6, 9)), [(0, 5)], 9, exact=False)
    for wrong, marks, exact in (
        (spans((0, 0, 6), (1, 6, 9)), [(0, 5)], True),
        (spans((0, 0, 4), (1, 4, 9)), [(0, 5)], False),
        (spans((0, 0, 5)), [], True),
        (spans((0, 1, 9)), [], True),
        ((), [], True),
    ):
        with pytest.raises(EngineError):
            check_spans(wrong, marks, 9, exact=exact)


def test_a_parameter_that_nothing_fills_is_named():
    shard = rank_of()
    places = name_map(shard.layers)
    given = {n: places[n] for n in SHAPES if n != "mlp.experts.down_proj"}
    assert uncovered(shard.layers, given) == {"w2": E * H * I}

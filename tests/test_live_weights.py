"""A model's parameters as bits: every format into every storage that holds it, looked at, and never half accepted."""

import numpy as np
import pytest
import torch

from headrace.producers.engines.live_weights import LiveWeights
from headrace.schemas.delta import apply_update, decode_anchor, decode_delta, encode_anchor, encode_delta
from headrace.schemas.dtypes import Dtype
from headrace.schemas.errors import WeightUpdateError
from headrace.schemas.update import TensorPatch, WeightUpdate
from headrace.schemas.weight_hash import set_hash

STORED = [
    (torch.bfloat16, Dtype.BF16),
    (torch.float32, Dtype.BF16),
    (torch.float16, Dtype.FP16),
    (torch.float32, Dtype.FP32),
]


def model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7)).to(dtype)


def random_bits(live: LiveWeights, kind: Dtype, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    limit = 2 ** (8 * kind.bits.itemsize)
    return {name: rng.integers(0, limit, shape).astype(kind.bits) for name, shape in live.shapes.items()}


@pytest.mark.parametrize(("storage", "kind"), STORED)
def test_any_bits_of_any_format_go_in_and_come_out_through_anchor_and_delta(storage, kind):
    live = LiveWeights(model(storage))
    bits = random_bits(live, kind, 1)  # NaN payloads, infinities, denormals and -0.0 among them
    dtypes = dict.fromkeys(bits, kind)
    anchor = decode_anchor(encode_anchor(bits, 0, dtypes=dtypes), dtypes=dtypes)
    live.write(anchor)
    live.verify(anchor)
    assert live.hash() == anchor.weights_hash == set_hash(bits, dtypes=dtypes)
    new = {name: b.copy() for name, b in bits.items()}
    new["0.weight"].reshape(-1)[[0, 5, 1199]] ^= 0x8001
    made = encode_delta(bits, new, base_version=0, version=1, dtypes=dtypes)
    change = decode_delta(made.blob, bits, base_version=0, dtypes=dtypes)
    live.write(change, live.prepare(change))
    live.verify(change)
    apply_update(bits, change)
    assert live.hash() == change.weights_hash == set_hash(new, dtypes=dtypes)
    assert all(np.array_equal(live.bits()[name], b) for name, b in new.items())


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("whole", [False, True])
def test_one_element_that_is_not_what_was_written_is_seen(storage, whole):
    net = model(storage)
    live = LiveWeights(net)
    live.round_to_bf16()
    bits = live.bits()["0.weight"].reshape(-1).copy()
    where = None if whole else np.array([3, 700, 1199])
    patch = TensorPatch(
        name="0.weight", shape=(30, 40), indices=where, bits=bits if where is None else bits[where]
    )
    update = WeightUpdate(version=1, base_version=0, patches=(patch,), weights_hash=0)
    live.verify(update)
    net[0].weight.data.view(-1)[1199] *= 2
    with pytest.raises(WeightUpdateError) as e:
        live.verify(update)
    assert e.value.reason == "live_bits" and "0.weight" in str(e.value)
    live.write(update)
    live.verify(update)


@pytest.mark.parametrize(
    ("storage", "kind"),
    [(torch.bfloat16, Dtype.FP16), (torch.float16, Dtype.BF16), (torch.float32, Dtype.FP16)],
)
def test_a_format_that_the_storage_does_not_hold_is_refused(storage, kind):
    live = LiveWeights(model(storage))
    before = live.hash() if storage is not torch.float32 else None
    patch = TensorPatch(
        name="0.bias", shape=(30,), indices=np.array([1]), bits=np.array([7], dtype=kind.bits), dtype=kind
    )
    with pytest.raises(WeightUpdateError) as e:
        live.prepare(WeightUpdate(version=1, base_version=0, patches=(patch,), weights_hash=0))
    assert e.value.reason == "dtype"
    assert before is None or live.hash() == before


def test_a_delta_in_another_format_than_the_anchor_is_refused():
    live = LiveWeights(model(torch.float32))
    bits = random_bits(live, Dtype.FP32, 2)
    live.write(decode_anchor(encode_anchor(bits, 0)))
    patch = TensorPatch(
        name="0.bias", shape=(30,), indices=np.array([1]), bits=np.array([7], dtype=np.uint16)
    )
    with pytest.raises(WeightUpdateError) as e:
        live.check(WeightUpdate(version=1, base_version=0, patches=(patch,), weights_hash=0))
    assert e.value.reason == "dtype"

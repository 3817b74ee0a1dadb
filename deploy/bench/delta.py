"""Deltas: bytes a parameter beside the entropy of the same data and PULSE's format, speeds a core, memory.

The weights are N(0, 0.02) in tensors of 4 Mi; the step is AdamW's with white noise for a gradient, whose update is
the learning rate times N(0, 0.23); the learning rate is such that the wanted share of bf16 elements changes.
"""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import zstandard

from ...schemas.delta import Change, apply_update, decode_delta, read_patches, write_delta
from ...schemas.dtypes import Dtype
from ...schemas.rounding import changed, rounded
from ...schemas.weight_hash import tensor_hashes

SHARES = {"1pct": 0.01, "6_5pct": 0.065, "34pct": 0.34}
"""Label -> share of the elements that change."""
TENSOR = 1 << 22
_SIGMA, _UPDATE = 0.02, 0.23
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Masters before the step, the noise that is its update, and what everybody holds."""

    masters: Mapping[str, np.ndarray]
    noise: Mapping[str, np.ndarray]
    bits: Mapping[str, np.ndarray]
    hashes: Mapping[str, int]

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(b.size for b in self.bits.values())


def measure(
    *, params: int, repeats: int, threads: int, seed: int = 0, say: Callable[[str], None]
) -> dict[str, Any]:
    """Every figure but the fine-tune's, over `params` parameters rounded up to whole tensors."""
    model = make_model(params, seed)
    found: dict[str, Any] = {"params": model.elements, "threads": threads}
    found["memcpy_gb_s"] = _memcpy_gb_s(model, repeats)
    peaks = {}
    for label, share in SHARES.items():
        say(f"{share:.1%} of the elements changed")
        lr = learning_rate(model, share)
        stepped = {n: w - np.float32(lr) * model.noise[n] for n, w in model.masters.items()}
        found |= {f"{name}_{label}": value for name, value in sizes(model, stepped).items()}
        found |= {
            f"{name}_{label}": value for name, value in speeds(model, stepped, repeats, threads).items()
        }
        peaks[label] = peak_extra_ratio(model, stepped)
        found[f"peak_extra_ratio_{label}"] = peaks[label]
    found["encode_mparam_s"] = found["encode_mparam_s_1pct"]
    found["apply_mparam_s"] = found["apply_mparam_s_1pct"]
    found["peak_extra_ratio"] = max(peaks.values())
    return found


def make_model(params: int, seed: int) -> Model:
    """`params` weights and the update's noise."""
    rng = np.random.default_rng(seed)
    names = [f"model.layers.{i}.weight" for i in range(-(-params // TENSOR))]

    def normal(sigma: float) -> dict[str, np.ndarray]:
        made = {name: rng.standard_normal((TENSOR >> 11, 2048), dtype=np.float32) for name in names}
        for values in made.values():
            values *= np.float32(sigma)
        return made

    masters = normal(_SIGMA)
    bits = {n: rounded(w.reshape(-1), Dtype.BF16).reshape(w.shape) for n, w in masters.items()}
    return Model(masters=masters, noise=normal(_UPDATE), bits=bits, hashes=tensor_hashes(bits))


def learning_rate(model: Model, share: float) -> float:
    """At which `share` of the bf16 elements change, found on a part of the first tensor."""
    name = next(iter(model.bits))
    old, master, noise = (
        side[name].reshape(-1)[:_BLOCK] for side in (model.bits, model.masters, model.noise)
    )
    low, high = 1e-8, 1e-2
    for _ in range(24):
        middle = float(np.sqrt(low * high))
        count = len(changed(old, master - np.float32(middle) * noise, Dtype.BF16)[0])
        low, high = (middle, high) if count < share * len(old) else (low, middle)
    return low


def sizes(model: Model, stepped: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Bytes a parameter: ours, the bound, PULSE's; and the share that changed."""
    with tempfile.TemporaryFile() as sink:
        totals = _encode(sink, model, stepped, threads=1)
        size = sink.tell()
    pulse, gaps, steps = 0, 0, np.zeros(1 << 16, dtype=np.int64)
    for name, old in model.bits.items():
        flat = old.reshape(-1)
        where, values = changed(flat, stepped[name].reshape(-1), Dtype.BF16)
        steps += np.bincount(values - flat[where], minlength=1 << 16)
        pulse += pulse_bytes(where, values)
        gaps += len(where)
    n = model.elements
    bound = (n * entropy(np.array([gaps, n - gaps])) + gaps * entropy(steps)) / 8
    return {
        "changed": gaps / n,
        "bytes_per_param": size / n,
        "bound": bound / n,
        "over_bound": size / bound,
        "pulse": pulse / n,
        "full_copy_ratio": 2 * totals.elements / size,
    }


def entropy(counts: np.ndarray) -> float:
    """Bits a symbol of the distribution `counts`."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def pulse_bytes(where: np.ndarray, values: np.ndarray) -> int:
    """PULSE (arXiv 2602.03839): u16 gaps and new bf16 values, each zstd level 1. Gaps above 65535 are split."""
    gaps = np.diff(where, prepend=-1)
    more = gaps >> 16
    wide = np.repeat(gaps & 0xFFFF, more + 1).astype(np.uint16)
    compress = zstandard.ZstdCompressor(level=1).compress
    return len(compress(wide.tobytes())) + len(compress(values.tobytes()))


def speeds(model: Model, stepped: Mapping[str, np.ndarray], repeats: int, threads: int) -> dict[str, float]:
    """Million parameters a second: `encode` from fp32 and `apply` (decode, check, write) on one core by CPU time.

    The threaded figures are by the clock on the wall, with `threads` threads.
    """
    with tempfile.TemporaryFile() as sink:
        encode = best(lambda: _encode(_rewound(sink), model, stepped, threads=1), repeats, time.process_time)
        wall = best(lambda: _encode(_rewound(sink), model, stepped, threads=threads), repeats)
        sink.truncate()
        sink.seek(0)
        blob = sink.read()
    live = {name: bits.copy() for name, bits in model.bits.items()}

    def apply(threads: int) -> None:
        apply_update(
            live, decode_delta(blob, model.bits, base_version=0, base_hashes=model.hashes, threads=threads)
        )

    return {
        "encode_mparam_s": model.elements / encode / 1e6,
        "apply_mparam_s": model.elements / best(lambda: apply(1), repeats, time.process_time) / 1e6,
        "encode_wall_mparam_s": model.elements / wall / 1e6,
        "apply_wall_mparam_s": model.elements / best(lambda: apply(threads), repeats) / 1e6,
    }


def peak_extra_ratio(model: Model, stepped: Mapping[str, np.ndarray]) -> float:
    """Most memory that encoding to a file, validating and applying from it take, by the bytes of all tensors.

    As tracemalloc sees it: the arrays and buffers of Python and numpy, not zstd's and Arrow's own few megabytes.
    """
    live = {name: bits.copy() for name, bits in model.bits.items()}
    with tempfile.TemporaryFile() as sink:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            _encode(sink, model, stepped, threads=1)
            for write in (False, True):
                sink.seek(0)
                patches = read_patches(sink, live, base_version=0, base_hashes=model.hashes)
                for patch, _ in patches:
                    if write:
                        flat = live[patch.name].reshape(-1)
                        flat[slice(None) if patch.indices is None else patch.indices] = patch.bits
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
    return peak / sum(bits.nbytes for bits in live.values())


def best(run: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Least seconds of `repeats` runs."""
    found = []
    for _ in range(repeats):
        began = clock()
        run()
        found.append(clock() - began)
    return min(found)


def _encode(sink: BinaryIO, model: Model, stepped: Mapping[str, np.ndarray], *, threads: int) -> Any:
    def changes() -> Iterator[Change]:
        for name, old in model.bits.items():
            yield Change(name=name, old=old, new=stepped[name], base_hash=model.hashes[name])

    return write_delta(sink, changes(), base_version=0, version=1, threads=threads)


def _rewound(sink: BinaryIO) -> BinaryIO:
    sink.seek(0)
    return sink


def _memcpy_gb_s(model: Model, repeats: int) -> float:
    """Bytes copied a second, read once and written once: the yardstick of the machine."""
    source = next(iter(model.bits.values()))
    target = np.empty_like(source)
    return source.nbytes / best(lambda: np.copyto(target, source), 5 * repeats) / 1e9

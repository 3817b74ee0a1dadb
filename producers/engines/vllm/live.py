"""The weights of one rank of a running engine by their checkpoint names: checked against, written, read back.

Torch, but no vLLM. Bits of bf16 go into bfloat16 or, widened, into float32 storage; float32 into float32; fp16 into
float16 or float32. Whatever went in is what is read back. A name that the map does not know goes to the model's own
loader as a whole tensor, of which a copy is kept, because what a loader did with it cannot be read back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ....schemas.dtypes import Dtype
from ....schemas.errors import WeightUpdateError
from ....schemas.update import TensorPatch, WeightUpdate, check_same_tensors, unknown_tensor
from .fusing import Layer, name_map, uncovered
from .places import Block, Place, locate

Loader = Callable[[Sequence[tuple[str, torch.Tensor]]], None]
"""Takes whole checkpoint tensors, as a model's `load_weights` does."""

_STORABLE = {
    Dtype.BF16: (torch.bfloat16, torch.float32),
    Dtype.FP16: (torch.float16, torch.float32),
    Dtype.FP32: (torch.float32,),
}
_TORCH = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}


@dataclass(frozen=True, slots=True)
class Write:
    """One block's part of an update, ready to be written."""

    name: str
    """Of the checkpoint tensor."""
    block: Block
    positions: torch.Tensor | None
    """[m] int64 in the parameter; None: the whole block."""
    bits: np.ndarray
    """[m], or the block's shape."""
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class Prepared:
    """A whole update, checked, for one rank."""

    update: WeightUpdate
    writes: tuple[Write, ...]
    loads: tuple[TensorPatch, ...]
    """For the model's own loader."""
    known: Mapping[str, tuple[tuple[int, ...], Dtype]]
    """The tensors of the policy once it is written."""


@dataclass(slots=True)
class LiveShard:
    """The weights of one rank."""

    storage: Mapping[str, torch.Tensor]
    """Parameter -> where it is written: contiguous."""
    layers: Sequence[Layer]
    after: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    """Parameter -> what to call after it was written."""
    load: Loader | None = None
    """None: every parameter is in `layers`, so that a name that they do not know does not exist."""
    version: int = -1
    torn: bool = False
    """A write failed half way: only an anchor helps."""
    known: dict[str, tuple[tuple[int, ...], Dtype]] = field(default_factory=dict)
    """The tensors of the policy, from its first anchor on."""
    places: dict[str, Place] = field(default_factory=dict)
    copies: dict[str, np.ndarray] = field(default_factory=dict)
    """Bits of the tensors that went to the loader."""

    def __post_init__(self) -> None:
        self.places = name_map(self.layers)
        for name, tensor in self.storage.items():
            if not tensor.is_contiguous():
                raise WeightUpdateError("layout", f"{name} is not contiguous")

    def without(self, layers: Sequence[Layer]) -> None:
        """Keep only `layers` in the map."""
        self.layers, self.places = layers, name_map(layers)

    def prepare(self, update: WeightUpdate) -> Prepared:
        """Everything about `update` checked; nothing is written. Raises WeightUpdateError."""
        before, patches, anchor = dict(self.known), update.patches, update.base_version is None
        if not anchor and not before:
            raise WeightUpdateError("base_version", "a delta before the first anchor")
        self.check_base(update)
        for patch in patches:
            self._check(patch, before, anchor)
        self._check_unique(patches)
        if anchor:
            self._check_anchor(patches, before)
        writes: list[Write] = []
        loads: list[TensorPatch] = []
        for patch in patches:
            if patch.name in self.places:
                writes += self._writes(patch, self.places[patch.name])
            else:
                loads.append(patch)
        after = {p.name: (p.shape, p.dtype) for p in patches} if anchor else before
        return Prepared(update, tuple(writes), tuple(loads), after)

    def write(self, prepared: Prepared) -> None:
        """Write all of it in place.

        WeightUpdateError: it does not fit what is live, and nothing was written. Any other error: torn.
        """
        update = prepared.update
        self.check_base(update)
        self.torn = True
        for write in prepared.writes:
            self._write(write)
        for parameter in {w.block.parameter for w in prepared.writes} & set(self.after):
            self.after[parameter]()
        if prepared.loads:
            self._load(prepared.loads)
        self.known = dict(prepared.known)
        self.version, self.torn = update.version, False

    def check_base(self, update: WeightUpdate) -> None:
        """WeightUpdateError unless `update` goes on top of what is live."""
        if update.base_version is None:
            return
        if self.torn:
            raise WeightUpdateError("torn", "a delta on torn weights: an anchor must come first")
        if update.base_version != self.version:
            raise WeightUpdateError("base_version", f"{update.base_version} on top of {self.version}")

    def read(self, name: str) -> list[tuple[Block, np.ndarray]]:
        """This rank's boxes of a tensor of the policy and their bits, in the boxes' shapes.

        Raises WeightUpdateError if storage holds a value that the tensor's format cannot.
        """
        shape, dtype = self.known[name]
        if name in self.copies:
            whole = Block(parameter="", low=(0,) * len(shape), high=shape, offset=0, strides=())
            return [(whole, self.copies[name].reshape(shape))]
        return [(b, _bits(name, self.view(b), dtype)) for b in self.places[name].blocks]

    def verify_written(self, prepared: Prepared) -> None:
        """`verify` of the update that was written last, from the places that are known already."""
        for write in prepared.writes:
            stored = self.storage[write.block.parameter]
            where = self.view(write.block) if write.positions is None else stored.view(-1)[write.positions]
            _check_bits(write.name, write.block, _bits(write.name, where, write.dtype), write.bits)

    def verify(self, update: WeightUpdate) -> None:
        """WeightUpdateError(`live_bits`) unless the weights hold what `update` says, wherever it says something."""
        for patch in update.patches:
            for block, found, expected in self._compared(patch):
                _check_bits(patch.name, block, found, expected)

    def _compared(self, patch: TensorPatch) -> Iterable[tuple[Block, np.ndarray, np.ndarray]]:
        if patch.name in self.places and patch.indices is not None:
            for block, positions, chosen in locate(self.places[patch.name], patch.indices):
                stored = self.storage[block.parameter].view(-1)[torch.from_numpy(positions)]
                yield block, _bits(patch.name, stored, patch.dtype), patch.bits[chosen]
            return
        name = patch.name if patch.name in self.known else self._alias(patch.name) or patch.name
        for block, bits in self.read(name):
            if patch.indices is None:
                yield block, bits, patch.bits.reshape(patch.shape)[block.box]
            else:
                yield block, bits.reshape(-1)[patch.indices], patch.bits

    def _check_unique(self, patches: Sequence[TensorPatch]) -> None:
        """Every tensor once; tied ones may be listed under each of their names, with the same content."""
        names: set[str] = set()
        first: dict[object, TensorPatch] = {}
        for patch in patches:
            if patch.name in names:
                raise WeightUpdateError("duplicate_tensor", patch.name)
            names.add(patch.name)
            place = self.places.get(patch.name)
            where = patch.name if place is None else tuple((b.parameter, b.offset) for b in place.blocks)
            twin = first.setdefault(where, patch)
            if twin is not patch and not _same(twin, patch):
                raise WeightUpdateError(
                    "tied_tensors", f"{twin.name} and {patch.name} are one tensor, and differ"
                )

    def _check_anchor(self, patches: Sequence[TensorPatch], known: Mapping) -> None:
        if known:
            check_same_tensors({n: s for n, (s, _) in known.items()}, {p.name: p.shape for p in patches})
            return
        places = {p.name: self.places[p.name] for p in patches if p.name in self.places}
        for parameter, count in uncovered(self.layers, places).items():
            names = [n for n, p in self.places.items() if any(b.parameter == parameter for b in p.blocks)]
            lacking = [n for n in names if n not in places]
            if count > 0:
                raise WeightUpdateError("missing_tensor", f"{', '.join(lacking[:3])} for {parameter}")
            raise WeightUpdateError("duplicate_tensor", f"{parameter} is given more than once")

    def _check(self, patch: TensorPatch, known: Mapping, anchor: bool) -> None:
        name = patch.name
        place = self.places.get(name)
        if not anchor and name not in known and (place is None or self._alias(name, known) is None):
            raise WeightUpdateError("unknown_tensor", unknown_tensor(name, known))
        if place is None and (self.load is None or (not anchor and name not in known)):
            raise WeightUpdateError("unknown_tensor", unknown_tensor(name, self.places))
        shape = place.shape if place is not None else known.get(name, (patch.shape, None))[0]
        if tuple(patch.shape) != tuple(shape):
            raise WeightUpdateError("shape", f"{name} is {list(shape)}, given {list(patch.shape)}")
        if patch.bits.dtype != patch.dtype.bits:
            raise WeightUpdateError("dtype", f"{name} is {patch.dtype}, held as {patch.bits.dtype}")
        if not anchor:
            stated = known.get(name) or known[self._alias(name, known) or name]
            if stated[1] is not patch.dtype:
                raise WeightUpdateError("dtype", f"{name} is {stated[1]}, given {patch.dtype}")
        for block in place.blocks if place is not None else ():
            held = self.storage[block.parameter].dtype
            if held not in _STORABLE[patch.dtype]:
                raise WeightUpdateError("dtype", f"{name} is {patch.dtype}, the engine holds {held}")
        _check_positions(patch)

    def _alias(self, name: str, known: Mapping | None = None) -> str | None:
        """The name under which the policy lists the tensor that is tied to `name`."""
        known = self.known if known is None else known
        place = self.places.get(name)
        return None if place is None else next((n for n in known if self.places.get(n) == place), None)

    def _writes(self, patch: TensorPatch, place: Place) -> Iterable[Write]:
        if patch.indices is None:
            whole = patch.bits.reshape(patch.shape)
            for block in place.blocks:
                yield Write(patch.name, block, None, whole[block.box], patch.dtype)
            return
        for block, positions, chosen in locate(place, patch.indices):
            yield Write(patch.name, block, torch.from_numpy(positions), patch.bits[chosen], patch.dtype)

    def _write(self, write: Write) -> None:
        storage = self.storage[write.block.parameter]
        values = _stored(write.bits, write.dtype, storage.dtype).to(storage.device)
        if write.positions is None:
            self.view(write.block).view(values.dtype).copy_(values)
        else:
            storage.view(-1).view(values.dtype).index_copy_(0, write.positions.to(storage.device), values)

    def view(self, block: Block) -> torch.Tensor:
        """Storage of a block, in its shape."""
        return self.storage[block.parameter].as_strided(block.sizes, block.strides, block.offset)

    def _load(self, patches: Sequence[TensorPatch]) -> None:
        assert self.load is not None
        tensors = []
        for patch in patches:
            if patch.indices is None:
                self.copies[patch.name] = patch.bits.copy()
            else:
                self.copies[patch.name][patch.indices] = patch.bits
            bits = torch.from_numpy(self.copies[patch.name].view(_signed(patch.dtype)))
            tensors.append((patch.name, bits.view(_TORCH[patch.dtype]).view(patch.shape)))
        self.load(tensors)


def _check_bits(name: str, block: Block, found: np.ndarray, expected: np.ndarray) -> None:
    if not np.array_equal(found, expected):
        wrong = int((found != expected).sum())
        raise WeightUpdateError("live_bits", f"{name}: {wrong} elements differ in {block.parameter}")


def _same(a: TensorPatch, b: TensorPatch) -> bool:
    if a.indices is None or b.indices is None:
        return a.indices is b.indices and a.dtype is b.dtype and np.array_equal(a.bits, b.bits)
    return a.dtype is b.dtype and np.array_equal(a.bits, b.bits) and np.array_equal(a.indices, b.indices)


def _check_positions(patch: TensorPatch) -> None:
    total = math.prod(patch.shape)
    if patch.indices is None:
        if patch.bits.shape != (total,):
            raise WeightUpdateError("size", f"{patch.name}: {patch.bits.size} values for {total} elements")
        return
    if patch.indices.dtype != np.int64 or patch.indices.shape != patch.bits.shape or patch.bits.ndim != 1:
        raise WeightUpdateError(
            "positions", f"{patch.name}: {patch.indices.shape} positions of {patch.indices.dtype}"
        )
    if not len(patch.indices):
        return
    if patch.indices[0] < 0 or patch.indices[-1] >= total or (np.diff(patch.indices) <= 0).any():
        raise WeightUpdateError("positions", f"{patch.name}: not sorted, not unique or not in [0, {total})")


def _signed(dtype: Dtype) -> np.dtype:
    return np.dtype(np.int32 if dtype is Dtype.FP32 else np.int16)


def _stored(bits: np.ndarray, dtype: Dtype, held: torch.dtype) -> torch.Tensor:
    """`bits` as integers of the width of `held`: a copy of floats may change the payload of a NaN."""
    if _TORCH[dtype] is held:
        return torch.from_numpy(np.ascontiguousarray(bits).view(_signed(dtype)))
    if dtype is Dtype.BF16:
        return torch.from_numpy((bits.astype(np.uint32) << 16).view(np.int32))
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.float16).astype(np.float32).view(np.int32))


def _bits(name: str, stored: torch.Tensor, dtype: Dtype) -> np.ndarray:
    """`stored` as bit patterns of `dtype`, in its shape."""
    width = torch.int32 if stored.dtype is torch.float32 else torch.int16
    found = stored.contiguous().view(width).cpu().numpy()
    if _TORCH[dtype] is stored.dtype:
        return found.view(dtype.bits)
    wide = found.view(np.uint32)
    if dtype is Dtype.BF16:
        narrow, lost = (wide >> 16).astype(np.uint16), bool((wide & 0xFFFF).any())
    else:
        with np.errstate(over="ignore"):
            half = wide.view(np.float32).astype(np.float16)
        narrow, lost = half.view(np.uint16), not np.array_equal(half.astype(np.float32).view(np.uint32), wide)
    if lost:
        raise WeightUpdateError(f"not_{dtype}", f"{name} holds a value that {dtype} cannot")
    return narrow

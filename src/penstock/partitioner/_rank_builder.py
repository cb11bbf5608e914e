"""A rank's step graph while it is written: storages, values, operators, changes of placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from penstock.graph.encoding import FULL, dtype_from_name
from penstock.graph.step_graph import Kind, Operator, Phase, Storage, TensorView, views_in
from penstock.partitioner._mesh import (
    PARTIAL,
    REPLICATED,
    Mesh,
    Placement,
    can_split,
    find_scattering,
)
from penstock.partitioner._pieces import (
    Digit,
    StoragePiece,
    dense_strides,
    is_dense,
    join_digits,
    local_extents,
    split_into_digits,
    view_digits,
)

_GATHER = "_c10d_functional.all_gather_into_tensor.default"
_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
_REDUCE = "_c10d_functional.all_reduce.default"
_TRADE = "_c10d_functional.all_to_all_single.default"
_WAIT = "_c10d_functional.wait_tensor.default"
CLONE, COPY = "aten.clone.default", "aten.copy_.default"


class RankExchange(NamedTuple):
    """A collective of a rank's step.

    Attributes:
        operator: Index of the operator that asks for it, in the step of all devices.
        kind: As of `Collective`.
        level: Level of the mesh.
        num_bytes: Bytes that the rank receives.
    """

    operator: int
    kind: str
    level: int
    num_bytes: int


class RankBuilder:
    """A rank's step while it is written.

    Attributes:
        mesh: Levels of ranks.
        coordinates: The rank's.
        groups: For each level the name of its process group.
        exchanges: Collectives so far.
        source: The operator of the whole step that operators are written for.
    """

    def __init__(
        self,
        mesh: Mesh,
        coordinates: tuple[int, ...],
        groups: tuple[str, ...],
        byte_seconds: tuple[float, ...],
    ) -> None:
        self.mesh = mesh
        self.coordinates = coordinates
        self.groups = groups
        self._byte_seconds = byte_seconds  # of each level
        self._last_collective: tuple[int, ...] = ()
        self.storages: list[Storage] = []
        self.storage_of_value: list[int] = []
        self.operators: list[Operator] = []
        self.exchanges: list[RankExchange] = []
        self.source: tuple[int, str, Phase, str] = (-1, "", Phase.FORWARD, "")
        self.kind = Kind.ACTIVATION
        self._names: dict[str, int] = {}

    def storage(self, name: str, num_bytes: int, kind: Kind) -> int:
        """Add a storage; return its first value."""
        number = self._names.get(name, 0)
        self._names[name] = number + 1
        name = f"{name}:{number}" if number else name
        self.storages.append(Storage(name=name, num_bytes=num_bytes, kind=kind))
        return self.value(len(self.storages) - 1)

    def value(self, storage: int) -> int:
        """Add a value of a storage; return its index."""
        self.storage_of_value.append(storage)
        return len(self.storage_of_value) - 1

    def next_value(self, value: int) -> int:
        """Add the value that follows another in its storage."""
        return self.value(self.storage_of_value[value])

    def emit(
        self,
        target: str,
        args: tuple[Any, ...],
        outputs: tuple[TensorView | None, ...] = (),
        *,
        kwargs: Mapping[str, Any] | None = None,
        mutates: tuple[tuple[int, int], ...] = (),
        **fields: Any,
    ) -> None:
        """Add an operator."""
        _, name, phase, module = self.source
        old = {value for value, _ in mutates}
        new = {value for _, value in mutates}
        views = [view.value for view in views_in([args, dict(kwargs or {})])]
        made = [view.value for view in outputs if view is not None and view.value not in new]
        fields = {"phase": phase, "module": module, "name": name} | fields
        number = self._names.get(f"operator {fields['name']}", 0)
        self._names[f"operator {fields['name']}"] = number + 1
        if number:
            fields["name"] += f":{number}"
        self.operators.append(
            Operator(
                target=target,
                args=args,
                kwargs=kwargs or {},
                outputs=outputs,
                reads=tuple(dict.fromkeys(each for each in views if each not in old)),
                creates=tuple(dict.fromkeys(made)),
                mutates=mutates,
                **fields,
            )
        )

    def new_view(self, shape: tuple[int, ...], dtype: str) -> TensorView:
        """Return a dense view of a new storage."""
        num_bytes = prod(shape) * item_bytes(dtype)
        value = self.storage(f"{self.source[1]}.piece", num_bytes, self.kind)
        stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return TensorView(value, dtype, shape, stride)

    def call(self, target: str, *args: Any, like: TensorView, **kwargs: Any) -> TensorView:
        """Add an operator with one result, of the shape and dtype of a view; return it."""
        made = self.new_view(like.shape, like.dtype)
        self.emit(target, args, (made,), kwargs=kwargs)
        return made

    def change(
        self, target: str, view: TensorView, *args: Any, random: bool = False, **kwargs: Any
    ) -> TensorView:
        """Add an operator that writes into a view; return the view afterwards."""
        after = view._replace(value=self.next_value(view.value))
        changed = ((view.value, after.value),)
        self.emit(target, (view, *args), (after,), kwargs=kwargs, mutates=changed, random=random)
        return after

    def dense(self, view: TensorView) -> TensorView:
        """Return a view whose elements lie densely, as its shape says: itself, or a copy."""
        if is_dense(view):
            return view
        made = self.new_view(view.shape, view.dtype)
        self.emit(CLONE, (view,), (made,), kwargs={"memory_format": _CONTIGUOUS})
        return made

    def wait(self, view: TensorView) -> TensorView:
        """Wait for a collective's result."""
        after = self.next_value(view.value)
        self.emit(_WAIT, (view,), (None,), mutates=((view.value, after),))
        return view._replace(value=after)

    def collect(self, kind: str, level: int, view: TensorView) -> TensorView:
        """Add a collective of a level on a dense view; the ranks' parts are its first dimension."""
        k, group = self.mesh.sizes[level], self.groups[level]
        num_bytes = prod(view.shape) * item_bytes(view.dtype)
        if kind == "all_gather":
            target, shape, args = _GATHER, (k, *view.shape[1:]), (view, k, group)
            received = (k - 1) * num_bytes
        elif kind == "reduce_scatter":
            target, shape, args = _SCATTER, (1, *view.shape[1:]), (view, "sum", k, group)
            received = num_bytes * (k - 1) // k
        elif kind == "all_reduce":
            target, shape, args = _REDUCE, view.shape, (view, "sum", group)
            received = 2 * num_bytes * (k - 1) // k
        else:
            target, shape, args = _TRADE, view.shape, (view, (1,) * k, (1,) * k, group)
            received = num_bytes * (k - 1) // k
        self.exchanges.append(RankExchange(self.source[0], kind, level, received))
        made = self.new_view(shape, view.dtype)
        # All ranks run them in one order, whatever their plans are.
        last, self._last_collective = self._last_collective, (len(self.operators),)
        seconds = received * self._byte_seconds[level]
        self.emit(target, args, (made,), recomputable=False, after=last, seconds=seconds)
        return self.wait(made)

    # Changes of placement.

    def move(self, piece: StoragePiece, need: Placement, extents: tuple[int, ...]) -> StoragePiece:
        """Change the placement of a piece; the order of collectives is that of `find_moves`."""
        if piece.placement == need:
            return piece
        summed = [i for i, axis in enumerate(piece.placement) if axis == PARTIAL != need[i]]
        if summed:
            piece = self._add_up(piece, need, extents, summed)
        held = piece.placement
        digits = split_into_digits(extents, (held, need), self.mesh.sizes)
        if digits is None:  # pieces are numbered anew: gathered in between
            axes = set(range(len(extents)))
            one_by_one = {
                axis
                for axis in axes
                if split_into_digits(
                    extents, (_only(held, {axis}), _only(need, {axis})), self.mesh.sizes
                )
                is None
            }
            middle = tuple(REPLICATED if axis in one_by_one else axis for axis in held)
            return self.move(self.move(piece, middle, extents), need, extents)
        view = view_digits(piece, digits)
        for level, axis in enumerate(need):
            if axis >= 0 and held[level] == REPLICATED:
                view = self._cut(view, digits, axis, level)
        for level in range(len(held)):
            if held[level] >= 0 and need[level] != held[level]:
                view = self._unsplit(view, digits, held[level], need[level], level)
        new_sums = [
            level
            for level, axis in enumerate(need)
            if axis == PARTIAL and held[level] == REPLICATED
        ]
        if any(self.coordinates[level] for level in new_sums):
            # A whole tensor is a sum of which one rank has all.
            made = self.new_view(view.shape, view.dtype)
            self.emit(FULL, (0,), (made,))
            view = made
        return self._join(view, digits, need, extents)

    def _add_up(
        self, piece: StoragePiece, need: Placement, extents: tuple[int, ...], summed: list[int]
    ) -> StoragePiece:
        now, sizes = [*piece.placement], self.mesh.sizes

        def fits(level: int) -> bool:
            levels = tuple(i for i, each in enumerate(now) if each == need[level] or i == level)
            return need[level] >= 0 and can_split(extents[need[level]], levels, sizes)

        cut = [i for i, axis in enumerate(piece.placement) if axis == REPLICATED and fits(i)]
        for level in cut:
            now[level] = need[level]
        scattered = []
        for level in reversed(summed):
            if fits(level):
                scattered.append(level)
                now[level] = need[level]
        placement = tuple(
            REPLICATED if axis == PARTIAL and i in summed else axis for i, axis in enumerate(now)
        )
        digits = split_into_digits(extents, (piece.placement, placement), sizes)
        if digits is None:  # pieces are numbered anew: added up whole
            placement = tuple(
                REPLICATED if i in summed else axis for i, axis in enumerate(piece.placement)
            )
            cut, scattered = [], []
            digits = split_into_digits(extents, (placement,), sizes)
            assert digits is not None
        view = view_digits(piece, digits)
        for level in cut:
            view = self._cut(view, digits, need[level], level)
        for level in scattered:
            dim = _find(digits, need[level], level)
            front = self.dense(_move_to_front(view, dim))
            view = _move_back(self.collect("reduce_scatter", level, front), dim)
        view = self.add_up_whole(view, [i for i in summed if i not in scattered])
        return self._join(view, digits, placement, extents)

    def add_up_whole(self, view: TensorView, levels: Sequence[int]) -> TensorView:
        """Return the sum over the ranks of some levels, whole on each; collectives as `find_moves`
        has them.
        """
        if not levels:
            return view
        found, sizes = self.dense(view), self.mesh.sizes
        shape, stride, num = found.shape, found.stride, prod(found.shape)
        levels = sorted(levels, reverse=True)
        inner = find_scattering(num, levels, sizes)
        for level in inner:
            num //= sizes[level]
            found = found._replace(shape=(sizes[level], num), stride=(num, 1))
            found = self.collect("reduce_scatter", level, found)
        for level in levels[len(inner) :]:
            found = self.collect("all_reduce", level, found)
        for level in reversed(inner):
            found = found._replace(shape=(1, num), stride=(num, 1))
            found = self.collect("all_gather", level, found)
            num *= sizes[level]
        return found._replace(shape=shape, stride=stride)

    def _cut(
        self, view: TensorView, digits: tuple[Digit, ...], axis: int, level: int
    ) -> TensorView:
        """Fix a digit to the rank's coordinate."""
        dim = _find(digits, axis, level)
        shape = [*view.shape]
        shape[dim] = 1
        offset = view.offset + view.stride[dim] * self.coordinates[level]
        return view._replace(shape=tuple(shape), offset=offset)

    def _unsplit(
        self, view: TensorView, digits: tuple[Digit, ...], axis: int, need: int, level: int
    ) -> TensorView:
        """Make a digit whole; fix another in its place where there is one."""
        dim = _find(digits, axis, level)
        if need < 0:
            front = self.dense(_move_to_front(view, dim))
            return _move_back(self.collect("all_gather", level, front), dim)
        other = _find(digits, need, level)
        front = self.dense(_move_to_front(view, other))
        traded = self.collect("all_to_all", level, front)
        # The first dimension is now the rank that sent: the digit of the axis that was split.
        view = _move_back(traded, other)
        shape, stride = [*view.shape], [*view.stride]
        shape[dim], stride[dim] = shape[other], stride[other]
        shape[other] = 1
        return view._replace(shape=tuple(shape), stride=tuple(stride))

    def _join(
        self,
        view: TensorView,
        digits: tuple[Digit, ...],
        placement: Placement,
        extents: tuple[int, ...],
    ) -> StoragePiece:
        found = join_digits(view, digits, placement, len(extents))
        if found is None:
            found = join_digits(self.dense(view), digits, placement, len(extents))
            assert found is not None
        return found

    def compact(self, piece: StoragePiece, *, own: bool = False) -> StoragePiece:
        """Return a piece that lies densely in a storage of its own: itself, or a copy.

        Args:
            piece: The piece.
            own: Whether it must be a copy.
        """
        dense = dense_strides(piece.extents)
        is_whole = all(
            a == b or size == 1
            for a, b, size in zip(piece.strides, dense, piece.extents, strict=True)
        )
        if is_whole and not own and not piece.offset:
            return piece
        view = TensorView(
            piece.value, piece.dtype, piece.extents[::-1], piece.strides[::-1], piece.offset
        )
        made = self.new_view(view.shape, view.dtype)
        self.emit(CLONE, (view,), (made,), kwargs={"memory_format": _CONTIGUOUS})
        return piece._replace(value=made.value, strides=dense, offset=0)

    def narrow(self, piece: StoragePiece, region: tuple[tuple[int, int], ...]) -> StoragePiece:
        """Return the part of a piece that is in a region, of axes that are not split."""
        lows, extents, offset = [*piece.lows], [*piece.extents], piece.offset
        for axis, (low, high) in enumerate(region):
            if axis not in piece.placement and high - low < extents[axis]:
                offset += (low - lows[axis]) * piece.strides[axis]
                lows[axis], extents[axis] = low, high - low
        return piece._replace(lows=tuple(lows), extents=tuple(extents), offset=offset)


_CONTIGUOUS = {"memory_format": "contiguous_format"}


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element."""
    return dtype_from_name(dtype).itemsize


def whole_extents(
    extents: tuple[int, ...], placement: Placement, mesh: Mesh
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the extents and the dense strides of a rank's piece."""
    local = local_extents(extents, placement, mesh.sizes)
    return local, dense_strides(local)


def _only(placement: Placement, axes: set[int]) -> Placement:
    return tuple(axis if axis in axes else REPLICATED for axis in placement)


def _find(digits: tuple[Digit, ...], axis: int, level: int) -> int:
    return next(i for i, each in enumerate(digits) if (each.axis, each.level) == (axis, level))


def _move_to_front(view: TensorView, dim: int) -> TensorView:
    def moved(each: tuple[int, ...]) -> tuple[int, ...]:
        return each[dim], *each[:dim], *each[dim + 1 :]

    return view._replace(shape=moved(view.shape), stride=moved(view.stride))


def _move_back(view: TensorView, dim: int) -> TensorView:
    def moved(each: tuple[int, ...]) -> tuple[int, ...]:
        rest = each[1:]
        return *rest[:dim], each[0], *rest[dim:]

    return view._replace(shape=moved(view.shape), stride=moved(view.stride))

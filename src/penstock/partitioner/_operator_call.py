"""One operator of a partitioned step, while it is written for a rank.

Its operands are brought into the placements that its split asks for, and its results to rest.
"""

from __future__ import annotations

from math import prod
from typing import Any

from penstock.errors import PlanError
from penstock.graph.executable import unplaced_bytes
from penstock.graph.step_graph import Kind, Operator, TensorView, map_views
from penstock.partitioner._mesh import PARTIAL, REPLICATED, Mesh, Placement
from penstock.partitioner._pieces import StoragePiece, find_region, split_into_digits
from penstock.partitioner._rank_builder import COPY
from penstock.partitioner._rank_storages import RankStorages
from penstock.partitioner._split import made_placement, needed_placement
from penstock.partitioner.axes import AxisRule, OperatorAxes, Use, find_rule, mark_writes


class OperatorCall:
    """An operator and a rank.

    Attributes:
        writer: The rank's pieces.
        builder: Its step.
        operator: The operator of the whole step.
        axes: Its axes.
        split: The axis that each level splits.
        rule: Its letters; None if the axis table has none.
    """

    def __init__(self, writer: RankStorages, index: int, operator: Operator) -> None:
        self.writer = writer
        self.builder = writer.builder
        self.index = index
        self.operator = operator
        self.axes: OperatorAxes = writer.axes.operators[index]
        self.split = writer.splits[index]
        self.rule: AxisRule | None = find_rule(operator)
        storage = next(iter((*self.axes.outputs, *self.axes.inputs)), None)
        if storage is not None:
            kind = writer.graph.storages[storage.storage].kind
            self.builder.kind = Kind.GRADIENT if kind is Kind.GRADIENT else Kind.ACTIVATION
        self._inputs = iter(self.axes.inputs)
        self._labels = iter([each.labels for each in self.rule.inputs] if self.rule else [])
        self._fetched: dict[Any, StoragePiece] = {}
        self._made: list[tuple[Use, TensorView, StoragePiece]] = []
        self._old = {new: old for old, new in operator.mutates}
        self._marked = mark_writes(operator)
        self._writes = iter([is_written for _, is_written in self._marked])
        self._given: dict[int, StoragePiece] = {}
        self._is_added_up = False

    @property
    def name(self) -> str:
        """Name of the operator without its namespace and overload."""
        target = self.operator.target
        return target.split(".")[1] if target.startswith("aten.") else target

    @property
    def mesh(self) -> Mesh:
        """Levels of ranks."""
        return self.writer.mesh

    def pieces_of(self, letter: str) -> int:
        """Return the number of pieces into which a letter is split."""
        return prod(
            size
            for axis, size in zip(self.split, self.mesh.sizes, strict=True)
            if axis >= 0 and self.axes.names[axis][0] == letter
        )

    def local_shape(self, view: TensorView, labels: tuple[str, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's part of a view, by its letters."""
        labels = labels or ("",) * len(view.shape)
        return tuple(
            size // (self.pieces_of(letter) if letter else 1)
            for size, letter in zip(view.shape, labels, strict=True)
        )

    def operand_in(self, argument: Any) -> Any:
        """Return an argument with the rank's operands; arguments come in order."""
        return map_views(self._operand, argument)

    def whole_operand_in(self, argument: Any) -> Any:
        """Return an argument with operands that are whole on each rank, however it is split."""
        return map_views(lambda view: self._operand(view, is_whole=True), argument)

    def _operand(self, view: TensorView, *, is_whole: bool = False) -> TensorView:
        use, labels = next(self._inputs), next(self._labels, ())
        need = needed_placement(use, self.split)
        if is_whole:
            need, labels = (REPLICATED,) * len(need), ("",) * len(view.shape)
        piece = self._fetch(view, use, need)
        is_written = next(self._writes)
        if is_written:
            piece = self._own_piece(view, piece)
        shape = self.local_shape(view, labels)
        found = None
        if piece.is_in_order:  # kernels may ask for a dense last dimension
            found = self.writer.view(view, use.storage, piece, shape)
        if found is None:
            piece = self.builder.compact(piece)
            found = self.writer.view(view, use.storage, piece, shape)
        if found is None:
            raise self.refuse(f"its operand of shape {view.shape} is no view of a piece")
        self._fetched[view.value, need, self._region(view, use)] = piece
        if is_written and self._given.setdefault(view.value, piece) != piece:
            raise self.refuse("it writes into two parts of a storage")
        return found

    def _own_piece(self, view: TensorView, piece: StoragePiece) -> StoragePiece:
        """Return a piece to write into: a copy, where it would change what rests otherwise."""
        rest = self.writer.pieces[view.value]
        is_rest = piece.value == rest.value and piece.placement != rest.placement
        return self.builder.compact(piece, own=True) if is_rest else piece

    def _region(self, view: TensorView, use: Use) -> tuple[tuple[int, int], ...]:
        cuts = self.writer.axes.cuts[use.storage]
        if len(cuts) == 1:
            return ((0, self.writer.ends[use.storage]),)
        blocked = frozenset(a for a in use.blocked if a < len(cuts) - 1)
        return find_region(view, cuts, blocked)

    def _fetch(self, view: TensorView, use: Use, need: Placement) -> StoragePiece:
        """Return a piece of an operand in a placement, once for equal ones."""
        region = self._region(view, use)
        key = view.value, need, region
        if key in self._fetched:
            return self._fetched[key]
        piece = self.writer.pieces[view.value]
        if piece.placement != need:
            piece = self.move_region(piece, need, self.writer.extents(use.storage), region)
        self._fetched[key] = piece
        return piece

    def move_region(
        self,
        piece: StoragePiece,
        need: Placement,
        extents: tuple[int, ...],
        region: tuple[tuple[int, int], ...],
    ) -> StoragePiece:
        """Change the placement of the part of a piece that is in a region."""
        part = {axis for axis, (low, high) in enumerate(region) if high - low < extents[axis]}
        if part & {*piece.placement}:  # split along an axis of which a part is needed
            middle = tuple(REPLICATED if axis in part else axis for axis in piece.placement)
            piece = self.builder.move(piece, middle, extents)
        if part & {*need}:
            raise self.refuse("it is split along an axis of which it sees a part")
        piece = self.builder.narrow(piece, region)
        lows = piece.lows
        inside = tuple(
            high - low if axis in part else extents[axis] for axis, (low, high) in enumerate(region)
        )
        return self.builder.move(piece, need, inside)._replace(lows=lows)

    def levels_of(self, letter: str) -> list[int]:
        """Return the levels that split a letter."""
        names = self.axes.names
        return [i for i, axis in enumerate(self.split) if axis >= 0 and names[axis][0] == letter]

    def declare_outputs(self, *, added_up: bool = False) -> tuple[TensorView | None, ...]:
        """Return the rank's results; note the pieces that they are of.

        Args:
            added_up: Whether what is made are sums over all ranks already.
        """
        self._is_added_up = added_up
        uses = iter(self.axes.outputs)
        rule = self.rule
        labels = iter([each.labels for each in rule.outputs] if rule else [])
        outputs: list[TensorView | None] = []
        for view in self.operator.outputs:
            outputs.append(
                None if view is None else self._declare(view, next(uses), next(labels, ()))
            )
        for use in uses:  # overwritten without being a result
            old, new = next(
                (old, new)
                for old, new in self.operator.mutates
                if self.writer.graph.storage_of_value[old] == use.storage
                and new not in {view.value for _, view, _ in self._made}
            )
            view = next(
                view for view, is_written in self._marked if is_written and view.value == old
            )
            self._declare(view._replace(value=new), use, next(labels, ()))
        return tuple(outputs)

    def _declare(self, view: TensorView, use: Use, labels: tuple[str, ...]) -> TensorView:
        made = made_placement(use, self.split)
        if self._is_added_up:
            made = tuple(REPLICATED if axis == PARTIAL else axis for axis in made)
        known = next((piece for _, each, piece in self._made if each.value == view.value), None)
        if known is not None:
            piece = known
        elif view.value in self._old:
            given = self._given[self._old[view.value]]
            piece = given._replace(value=self.builder.next_value(given.value), placement=made)
        else:
            piece = self.writer.new_piece(use.storage, made, view.dtype)
        self._made.append((use, view, piece))
        found = self.writer.view(view, use.storage, piece, self.local_shape(view, labels))
        if found is None:
            raise self.refuse(f"its result of shape {view.shape} is no view of a piece")
        return found

    def emit(
        self,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[TensorView | None, ...],
    ) -> None:
        """Write the operator itself."""
        operator, sizes = self.operator, self.mesh.sizes
        pieces = prod(k for axis, k in zip(self.split, sizes, strict=True) if axis >= 0)
        # Results that are made elsewhere count as workspace once the rank's step is written.
        workspace = operator.workspace_bytes - unplaced_bytes(self.writer.graph, operator)
        self.builder.emit(
            target,
            args,
            outputs,
            kwargs=kwargs,
            mutates=tuple(
                (self._given[old].value, self.made_piece(new).value)
                for old, new in operator.mutates
            ),
            after=tuple(self.writer.last_written[each] for each in operator.after),
            flops=operator.flops // pieces,
            bytes_read=operator.bytes_read // pieces,
            bytes_written=operator.bytes_written // pieces,
            workspace_bytes=-(-max(0, workspace) // pieces),
            random=operator.random,
            recomputable=operator.recomputable and operator.recompute_target is None,
            seconds=None if operator.seconds is None else operator.seconds / pieces,
        )

    def made_piece(self, value: int) -> StoragePiece:
        """Return the piece of a value that the operator makes."""
        return next(piece for _, view, piece in self._made if view.value == value)

    def made_after(self, value: int) -> int:
        """Return the rank's value that follows one that the operator writes into."""
        old = next(old for old, piece in self._given.items() if piece.value == value)
        return self.made_piece(next(new for new, each in self._old.items() if each == old)).value

    def average(self, outputs: tuple[TensorView | None, ...]) -> None:
        """Divide results that ranks average, so that they add up to the average."""
        if self.rule is None or not self.rule.averages:
            return
        for place, (use, view, piece) in enumerate([*self._made]):
            pieces = prod(
                size
                for axis, size in zip(self.split, self.mesh.sizes, strict=True)
                if axis in use.sums
            )
            if pieces > 1 and outputs[place] is not None:
                result = outputs[place]
                assert result is not None
                after = self.builder.change("aten.div_.Scalar", result, pieces)
                self._made[place] = use, view, piece._replace(value=after.value)

    def put_to_rest(self) -> None:
        """Bring results into the placements in which their storages rest."""
        writer, done = self.writer, set()
        for use, view, piece in self._made:
            if view.value in done:
                continue
            done.add(view.value)
            need, extents = writer.placements[use.storage], writer.extents(use.storage)
            if view.value not in self._old:
                moved = self.builder.move(piece, need, extents)
                writer.pieces[view.value] = self._without_waste(moved, use.storage)
                continue
            rest = writer.pieces[self._old[view.value]]
            given = self._given[self._old[view.value]]
            if given.value == rest.value:
                writer.pieces[view.value] = rest._replace(value=piece.value)
                if piece.placement != need:
                    raise self.refuse("it adds up over ranks what it writes in place")
                continue
            writer.pieces[view.value] = self._write_back(view, use, piece, rest)

    def _without_waste(self, piece: StoragePiece, storage: int) -> StoragePiece:
        """Return a piece that does not keep a larger storage alive."""
        held = self.builder.storages[self.builder.storage_of_value[piece.value]].num_bytes
        least = self.writer.local_bytes(storage, piece.placement)
        return self.builder.compact(piece, own=held > least)

    def _write_back(
        self, view: TensorView, use: Use, piece: StoragePiece, rest: StoragePiece
    ) -> StoragePiece:
        """Copy what was written in another placement into the storage at rest."""
        region, extents = self._region(view, use), self.writer.extents(use.storage)
        part = {axis for axis, (low, high) in enumerate(region) if high - low < extents[axis]}
        whole = tuple(REPLICATED if axis in part else axis for axis in rest.placement)
        moved = self.move_region(piece, whole, extents, region)
        place = rest
        for axis in part:
            begin, end = self._own_range(axis, rest, extents[axis])
            low, high = max(begin, region[axis][0]), min(end, region[axis][1])
            if low >= high:
                return rest  # other ranks have what was written
            place = _take_range(place, axis, low - begin, high - low)
            moved = _take_range(moved, axis, low - moved.lows[axis], high - low)
        of_rest, of_moved = (
            TensorView(p.value, p.dtype, p.extents[::-1], p.strides[::-1], p.offset)
            for p in (place, moved)
        )
        after = self.builder.change(COPY, of_rest, of_moved)
        return rest._replace(value=after.value)

    def _own_range(self, axis: int, piece: StoragePiece, extent: int) -> tuple[int, int]:
        """Return the indices of an axis that a piece has, from one to before another."""
        levels = [level for level, each in enumerate(piece.placement) if each == axis]
        alone = tuple(0 if each == axis else REPLICATED for each in piece.placement)
        digits = split_into_digits((extent,), (alone,), self.mesh.sizes)
        assert digits is not None, "one placement is always of its own kind"
        if [each.level for each in digits[: len(levels)]] != levels:
            raise self.refuse("it writes into a part of an axis that is split in turns")
        number = 0
        for level in levels:
            number = number * self.mesh.sizes[level] + self.builder.coordinates[level]
        return number * piece.extents[axis], (number + 1) * piece.extents[axis]

    def refuse(self, reason: str) -> PlanError:
        """Return the error of an operator that cannot run on pieces."""
        return PlanError(
            f"{self.operator.target} ({self.operator.name!r}, in module "
            f"{self.operator.module!r}) cannot run as it is split, {self.split}: {reason}; "
            "partition with another method= or number of devices",
            rule="operator",
        )


def _take_range(piece: StoragePiece, axis: int, first: int, extent: int) -> StoragePiece:
    """Return some indices of an axis of a piece."""
    extents = (*piece.extents[:axis], extent, *piece.extents[axis + 1 :])
    offset = piece.offset + first * piece.strides[axis]
    return piece._replace(extents=extents, offset=offset)

"""Building of the step graph: without operators that have no use, and with values numbered anew."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from penstock.graph.capturing._drafts import Draft, DraftStorage, StorageTable
from penstock.graph.capturing.recorder import Recorder
from penstock.graph.encoding import GET_RNG_STATE, SCALAR, SET_RNG_STATE
from penstock.graph.step_graph import Operator, StepGraph, Storage, TensorView, map_views


def build_graph(
    recorder: Recorder,
    tensors: Mapping[str, TensorView],
    loss: TensorView,
    device: str,
    metadata: Mapping[str, Any],
) -> StepGraph:
    """Return the step graph of a recorded step.

    Operators without a use are gone; results without a use are None and count as workspace.
    """
    table = recorder.storages
    inlined = _inline_numbers(recorder.drafts)
    loss_storage = table.of_value(loss.value)
    finals = {storage.current for storage in table.storages if storage.kind.persistent}
    drafts = _drop_unused_operators(
        [draft for draft in recorder.drafts if not set(draft.creates) & inlined.keys()],
        inlined,
        finals | {loss_storage.current},
    )
    builder = _GraphBuilder(table, drafts, inlined)
    storages = builder.storages(loss_storage)
    return StepGraph(
        storages=storages,
        storage_of_value=tuple(builder.storage_of_value),
        operators=builder.operators(),
        loss=builder.view(loss),
        device=device,
        tensors=map_views(builder.view, tensors),
        guards=map_views(builder.view, tuple(dict.fromkeys(recorder.numbers.guards))),
        metadata=metadata,
    )


def _inline_numbers(drafts: list[Draft]) -> dict[int, TensorView]:
    """Map numbers whose tensors do not change before their uses to the views to read instead."""
    last_reader: dict[int, int] = {}
    writer: dict[int, int] = {}
    for index, draft in enumerate(drafts):
        last_reader.update(dict.fromkeys(draft.reads, index))
        writer.update((old, index) for old, _ in draft.mutates)
    inlined = {}
    for draft in drafts:
        if draft.target == SCALAR:
            (number,), view = draft.creates, draft.args[0]
            if writer.get(view.value, len(drafts)) > last_reader.get(number, -1):
                inlined[number] = view
    return inlined


# Batch norms that update running statistics (their arguments 3 and 4), and operators that give the
# same bits without them.
_BATCH_NORMS = {
    "aten.native_batch_norm.default": "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.default": "aten.native_batch_norm.default",
    "aten.cudnn_batch_norm.default": "aten.cudnn_batch_norm.default",
    "aten.miopen_batch_norm.default": "aten.miopen_batch_norm.default",
}


def _drop_unused_operators(
    drafts: list[Draft], inlined: Mapping[int, TensorView], finals: set[int]
) -> list[Draft]:
    """Drop operators without a use, and random states if no operator draws numbers."""
    rng_targets = (GET_RNG_STATE, SET_RNG_STATE)
    if not any(draft.random and draft.target not in rng_targets for draft in drafts):
        drafts = [draft for draft in drafts if draft.target not in rng_targets]
    live, kept = set(finals), []
    for draft in reversed(drafts):
        advances = draft.random and draft.target != GET_RNG_STATE
        if draft.side_effect or advances or not live.isdisjoint(draft.makes):
            live.update(_source(value, inlined) for value in draft.needs)
            kept.append(draft)
    for draft in kept:
        _drop_unused_results(draft, live)
    return kept[::-1]


def _source(value: int, inlined: Mapping[int, TensorView]) -> int:
    """Return the value whose number is read in the place of an inlined one, or the value itself."""
    return inlined[value].value if value in inlined else value


def _drop_unused_results(draft: Draft, live: set[int]) -> None:
    unused = {value for value in draft.creates if value not in live}
    if not unused:
        return
    draft.outputs = tuple(
        None if view is None or view.value in unused else view for view in draft.outputs
    )
    draft.dropped = [*draft.dropped, *unused]
    draft.creates = [value for value in draft.creates if value not in unused]


class _GraphBuilder:
    """Numbers values anew, in the order in which they come to be."""

    def __init__(
        self, table: StorageTable, drafts: list[Draft], inlined: Mapping[int, TensorView]
    ) -> None:
        self._table = table
        self._drafts = drafts
        self._inlined = inlined
        of = table.storage_of_value
        values = [each.initial for each in table.storages if each.initial is not None]
        values += [value for draft in drafts for value in draft.makes]
        self._new = {value: number for number, value in enumerate(values)}
        self._kept = list(dict.fromkeys(of[value] for value in values))  # indices of storages
        new_storages = {storage: number for number, storage in enumerate(self._kept)}
        self.storage_of_value = [new_storages[of[value]] for value in values]

    def storages(self, loss: DraftStorage) -> tuple[Storage, ...]:
        storages: dict[str, Storage] = {}
        for draft in (self._table.storages[index] for index in self._kept):
            name = draft.name
            while name in storages:  # a parameter may be called as an operator is
                name += "_"
            lasts = draft.kind.persistent or draft is loss
            storages[name] = Storage(
                name=name,
                num_bytes=draft.num_bytes,
                kind=draft.kind,
                initial=None if draft.initial is None else self._new[draft.initial],
                final=self._new[draft.current] if lasts else None,
            )
        return tuple(storages.values())

    def operators(self) -> tuple[Operator, ...]:
        random = [index for index, draft in enumerate(self._drafts) if draft.random]
        after = {index: (last,) for last, index in itertools.pairwise(random)}
        return tuple(
            self._operator(draft, after.get(index, ())) for index, draft in enumerate(self._drafts)
        )

    def _operator(self, draft: Draft, after: tuple[int, ...]) -> Operator:
        old = {pair[0] for pair in draft.mutates}
        read = [_source(value, self._inlined) for value in draft.reads]
        unused_bytes = sum(self._table.of_value(value).num_bytes for value in draft.dropped)
        persistent = any(self._table.of_value(value).kind.persistent for value in old)
        args = map_views(self.view, draft.args)
        recompute_target = _BATCH_NORMS.get(draft.target) if persistent else None
        counts = draft.counts
        counts = counts._replace(workspace_bytes=counts.workspace_bytes + unused_bytes)
        return Operator(
            name=draft.name,
            target=draft.target,
            args=args,
            kwargs=map_views(self.view, draft.kwargs),
            outputs=map_views(self.view, draft.outputs),
            reads=tuple(self._new[value] for value in dict.fromkeys(read) if value not in old),
            creates=tuple(self._new[value] for value in draft.creates),
            mutates=tuple((self._new[before], self._new[new]) for before, new in draft.mutates),
            may_overwrite=tuple(
                (self._new[value], self._new[created])
                for value, created in dict.fromkeys(draft.overwrites)
                if created in draft.creates
            ),
            after=after,
            phase=draft.phase,
            module=draft.module,
            **counts._asdict(),
            random=draft.random,
            recomputable=not (draft.side_effect or draft.target == GET_RNG_STATE)
            and (not persistent or draft.target in _BATCH_NORMS)
            and not any(self._is_lost_on_host(value) for value in draft.needs),
            recompute_target=recompute_target,
            recompute_args=(*args[:3], None, None, *args[5:]) if recompute_target else None,
        )

    def _is_lost_on_host(self, value: int) -> bool:
        """Return whether a value is written over later, of a storage that no plan copies."""
        storage = self._table.of_value(value)
        return storage.is_on_host and storage.current != value

    def view(self, view: TensorView) -> TensorView:
        """Return a view of the new value; of an inlined number that of its tensor."""
        view = self._inlined.get(view.value, view)
        return view._replace(value=self._new[view.value])

"""From what was written down to a step graph: without what nobody needs, and numbered anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.graph.capturing.recorder import Block, Draft, Recorder
from penstock.graph.encoding import GET_RNG_STATE, SCALAR, SET_RNG_STATE
from penstock.graph.step_graph import Operator, StepGraph, Storage, TensorView


def finish(
    recorder: Recorder,
    tensors: Mapping[str, TensorView],
    loss: TensorView,
    device: str,
    metadata: Mapping[str, Any],
) -> StepGraph:
    """Make the step graph of what a recorder wrote down.

    Args:
        recorder: The recorder, after the whole step.
        tensors: Views of what the step begins with, by name.
        loss: The view of the loss.
        device: Type of the device.
        metadata: Where the graph comes from.

    Returns:
        The graph. Operators whose results nobody needs are gone, results that nobody needs are
        None and count as workspace.
    """
    inlined = _numbers_read_in_time(recorder.drafts)
    loss_block = recorder.block_of_value[loss.value]
    finals = {block.current for block in recorder.blocks if block.kind.persistent}
    drafts = _needed(
        [draft for draft in recorder.drafts if not set(draft.creates) & inlined.keys()],
        inlined,
        finals | {recorder.blocks[loss_block].current},
    )
    builder = _Builder(recorder.blocks, recorder.block_of_value, drafts, inlined)
    storages = builder.storages(loss_block)
    return StepGraph(
        storages=storages,
        storage_of_value=tuple(builder.storage_of_value),
        operators=builder.operators(),
        loss=builder.view(loss),
        device=device,
        tensors={name: builder.view(view) for name, view in tensors.items()},
        guards=tuple(
            (builder.expression(expression), outcome)
            for expression, outcome in dict.fromkeys(recorder.guards)
        ),
        metadata=metadata,
    )


def _numbers_read_in_time(drafts: list[Draft]) -> dict[int, TensorView]:
    """Map the numbers that can be read where they are needed, as nobody has changed them by then.

    Returns:
        For the value of each such number the view that is read instead.
    """
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


# Batch norms that update running statistics, and what gives the same results without any.
_BATCH_NORMS = {
    "aten.native_batch_norm.default": "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.default": "aten.native_batch_norm.default",
    "aten.cudnn_batch_norm.default": "aten.cudnn_batch_norm.default",
    "aten.miopen_batch_norm.default": "aten.miopen_batch_norm.default",
}
_RUNNING_MEAN, _RUNNING_VAR = 3, 4  # positions of the arguments, in all of them


def _needed(
    drafts: list[Draft], inlined: Mapping[int, TensorView], finals: set[int]
) -> list[Draft]:
    """Drop the operators whose results nobody needs, and random states if nothing is random."""
    rng_targets = (GET_RNG_STATE, SET_RNG_STATE)
    if not any(draft.random and draft.target not in rng_targets for draft in drafts):
        drafts = [draft for draft in drafts if draft.target not in rng_targets]
    live, kept = set(finals), []
    for draft in reversed(drafts):
        new = [pair[1] for pair in draft.mutates]
        advances = draft.random and draft.target != GET_RNG_STATE
        if draft.side_effect or advances or not live.isdisjoint(draft.creates + new):
            live.update(
                inlined[value].value if value in inlined else value for value in draft.reads
            )
            live.update(old for old, _ in draft.mutates)
            kept.append(draft)
    for draft in kept:
        _drop_unused_results(draft, live)
    return kept[::-1]


def _source(value: int, inlined: Mapping[int, TensorView]) -> int:
    """Return the value that is read for a number, or the value itself."""
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


class _Builder:
    """Numbers values anew, in the order in which they come to be."""

    def __init__(
        self,
        blocks: list[Block],
        block_of_value: list[int],
        drafts: list[Draft],
        inlined: Mapping[int, TensorView],
    ) -> None:
        self._blocks = blocks
        self._block_of_value = block_of_value
        self._drafts = drafts
        self._inlined = inlined
        initial = [block.initial for block in blocks if block.initial is not None]
        made = [[*draft.creates, *(new for _, new in draft.mutates)] for draft in drafts]
        values = initial + [value for values in made for value in values]
        self._new = {value: number for number, value in enumerate(values)}
        kept_blocks = dict.fromkeys(block_of_value[value] for value in values)
        self._new_block = {block: number for number, block in enumerate(kept_blocks)}
        self.storage_of_value = [self._new_block[block_of_value[value]] for value in values]

    def storages(self, loss_block: int) -> tuple[Storage, ...]:
        taken: dict[str, int] = {}
        return tuple(
            self._storage(self._blocks[block], block == loss_block, taken)
            for block in self._new_block
        )

    def _storage(self, block: Block, is_loss: bool, taken: dict[str, int]) -> Storage:
        name = block.name
        while name in taken:  # a parameter may be called as an operator is
            name += "_"
        taken[name] = 1
        ends = block.kind.persistent or is_loss
        return Storage(
            name=name,
            num_bytes=block.num_bytes,
            kind=block.kind,
            initial=None if block.initial is None else self._new[block.initial],
            final=self._new[block.current] if ends else None,
        )

    def operators(self) -> tuple[Operator, ...]:
        operators, last_random = [], None
        for index, draft in enumerate(self._drafts):
            after = () if last_random is None or not draft.random else (last_random,)
            if draft.random:
                last_random = index
            operators.append(self._operator(draft, after))
        return tuple(operators)

    def _operator(self, draft: Draft, after: tuple[int, ...]) -> Operator:
        old = {pair[0] for pair in draft.mutates}
        read = [_source(value, self._inlined) for value in draft.reads]
        unused_bytes = sum(
            self._blocks[self._block_of_value[value]].num_bytes for value in draft.dropped
        )
        persistent = any(self._blocks[self._block_of_value[value]].kind.persistent for value in old)
        args = tuple(map(self._argument, draft.args))
        return Operator(
            name=draft.name,
            target=draft.target,
            args=args,
            kwargs={name: self._argument(value) for name, value in draft.kwargs.items()},
            outputs=tuple(None if view is None else self.view(view) for view in draft.outputs),
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
            flops=draft.facts.flops,
            bytes_read=draft.facts.bytes_read,
            bytes_written=draft.facts.bytes_written,
            workspace_bytes=draft.facts.workspace_bytes + unused_bytes,
            random=draft.random,
            recomputable=not (draft.side_effect or draft.target == GET_RNG_STATE)
            and (not persistent or draft.target in _BATCH_NORMS),
            recompute_target=_BATCH_NORMS.get(draft.target) if persistent else None,
            recompute_args=self._args_without_statistics(draft) if persistent else None,
        )

    def _args_without_statistics(self, draft: Draft) -> tuple[Any, ...] | None:
        """A batch norm that trains gives the same bits without its running statistics."""
        if draft.target not in _BATCH_NORMS:
            return None
        args = [self._argument(value) for value in draft.args]
        args[_RUNNING_MEAN] = args[_RUNNING_VAR] = None
        return tuple(args)

    def view(self, view: TensorView) -> TensorView:
        return view._replace(value=self._new[view.value])

    def _argument(self, value: Any) -> Any:
        if isinstance(value, TensorView):
            return self.view(value)
        if isinstance(value, tuple):
            return tuple(map(self._argument, value))
        if isinstance(value, Mapping) and "scalar" in value:
            return {"scalar": self.expression(value["scalar"])}
        return value

    def expression(self, expression: Any) -> Any:
        if isinstance(expression, TensorView):
            return self.view(self._inlined.get(expression.value, expression))
        if isinstance(expression, tuple):
            return (expression[0], *map(self.expression, expression[1:]))
        return expression

"""A run of a plan: operands are read, cells called, and their outputs written, by pieces."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batching.dynamic._layout import BatchPlan, ExecutionPlan
from penstock.batching.dynamic._pools import OutputPools, ReadOperands, WriteOutputs
from penstock.batching.dynamic._splitting import BatchSplitter, InputTensors, Piece


class BatchRun:
    """A run of a plan, batch by batch and piece by piece."""

    def __init__(
        self,
        plan: ExecutionPlan,
        cells: dict[int, tuple[Hashable, nn.Module]],
        pools: OutputPools,
        inputs: InputTensors,
        input_index: Tensor,
        splitter: BatchSplitter | None,
    ) -> None:
        self._plan, self._cells, self._pools, self._splitter = plan, cells, pools, splitter
        self._inputs, self._input_index = inputs, input_index
        self._tokens: list[Tensor] = []
        self.is_tuple: dict[int, bool] = {}
        self.num_pieces = self.num_recomputed = 0

    def run(self) -> list[Tensor]:
        """Run all batches and return the token of each."""
        if self._splitter is not None:
            self._splitter.begin(self._plan, self._cells, self._pools, self._inputs)
        for batch in self._plan.batches:
            kind, cell = self._cells[batch.kind]
            done = 0
            tokens = []
            while done < batch.num_nodes:
                piece = Piece(done, batch.num_nodes)
                if self._splitter is not None:
                    piece = self._splitter.next_piece(batch, done)
                tokens.append(self._run_piece(batch, piece, kind, cell))
                done = piece.stop
                self.num_pieces += 1
                self.num_recomputed += piece.recompute
            self._tokens.append(tokens[0] if len(tokens) == 1 else torch.cat(tokens))
        return self._tokens

    def _run_piece(self, batch: BatchPlan, piece: Piece, kind: Hashable, cell: nn.Module) -> Tensor:
        def compute(*_: Tensor) -> Any:
            return cell(*self._gather_arguments(batch, piece))

        num_nodes = piece.stop - piece.start
        if piece.recompute and torch.is_grad_enabled():
            from torch.utils.checkpoint import checkpoint

            outputs = checkpoint(compute, use_reentrant=False)
        else:
            outputs = compute()
        components = outputs if isinstance(outputs, tuple) else (outputs,)
        for each in components:
            if not isinstance(each, Tensor) or each.shape[:1] != (num_nodes,):
                got = tuple(each.shape) if isinstance(each, Tensor) else type(each)
                raise ValueError(
                    f"the cell of {kind!r} must return a tensor or a tuple of tensors with one row "
                    f"for each of its {num_nodes} nodes; got {got}"
                )
        is_tuple = isinstance(outputs, tuple)
        if self.is_tuple.setdefault(batch.pool, is_tuple) != is_tuple:
            raise ValueError(
                f"the cell of {kind!r} returns {'a tuple' if is_tuple else 'a tensor'}, but cells "
                "with outputs for the same argument do not"
            )
        start = batch.start + piece.start
        token = WriteOutputs.apply(self._pools, batch.pool, start, kind, *components)
        assert isinstance(token, Tensor)
        return token

    def _gather_arguments(self, batch: BatchPlan, piece: Piece) -> list[Any]:
        """Return operands, argument by argument, and then inputs, of the nodes of a piece."""
        num_nodes = piece.stop - piece.start
        operands: dict[int, Any] = {}
        for whole in batch.operands:
            for part in piece.cut(whole, batch.num_nodes):
                tokens = [self._tokens[source] for source in part.sources]
                found = ReadOperands.apply(self._pools, part, num_nodes, *tokens)
                assert isinstance(found, tuple)
                width = len(found) // len(part.slots)
                for place, slot in enumerate(part.slots):
                    components_of_slot = found[place * width : (place + 1) * width]
                    operands[slot] = (
                        components_of_slot if self.is_tuple[part.pool] else components_of_slot[0]
                    )
        arguments = [operands[slot] for slot in range(len(operands))]
        for tensor in self._inputs.tensors.get(batch.kind, ()):
            if batch.inputs_in_order is not None:
                first = batch.inputs_in_order + piece.start
                arguments.append(tensor[first : first + num_nodes])
            else:
                rows = self._input_index[batch.input_rows][piece.start : piece.stop]
                arguments.append(tensor.index_select(0, rows.to(tensor.device)))
        return arguments

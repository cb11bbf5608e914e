"""The recurrent networks of SwapAdvisor's table, unrolled in time, in plain torch.

A cell is what frameworks without fused kernels run: one matrix product for the input, one for the
state. Shapes in names: B batch, H width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TanhCell(nn.Module):
    """h = tanh(W x + U h + b) (Elman 1990)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.of_input = nn.Linear(inputs, width)
        self.of_state = nn.Linear(width, width, bias=False)

    def scan(self, inputs: Iterable[Tensor]) -> list[Tensor]:
        """The states, one per time step."""
        states: list[Tensor] = []
        for x_BH in inputs:
            total = self.of_input(x_BH)
            states.append(torch.tanh(total + self.of_state(states[-1]) if states else total))
        return states


class LstmCell(nn.Module):
    """Hochreiter and Schmidhuber 1997, with a forget gate."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.of_input = nn.Linear(inputs, 4 * width)
        self.of_state = nn.Linear(width, 4 * width, bias=False)

    def scan(self, inputs: Iterable[Tensor]) -> list[Tensor]:
        """The states, one per time step."""
        states: list[Tensor] = []
        memory_BH: Tensor | None = None
        for x_BH in inputs:
            total = self.of_input(x_BH)
            if states:
                total = total + self.of_state(states[-1])
            write, forget, new, read = total.chunk(4, dim=1)
            update_BH = torch.sigmoid(write) * torch.tanh(new)
            memory_BH = (
                update_BH if memory_BH is None else torch.sigmoid(forget) * memory_BH + update_BH
            )
            states.append(torch.sigmoid(read) * torch.tanh(memory_BH))
        return states


_CELLS = {"tanh": TanhCell, "lstm": LstmCell}


class Recurrent(nn.Module):
    """Layers of cells over time, in one or both directions; the last states predict the target."""

    def __init__(self, *, num_layers: int, width: int, bidirectional: bool, cell: str) -> None:
        super().__init__()
        self.width, self.bidirectional = width, bidirectional
        make, directions = _CELLS[cell], 2 if bidirectional else 1
        self.layers = nn.ModuleList()
        for layer in range(num_layers):
            inputs = width if layer == 0 else directions * width
            self.layers.append(nn.ModuleList(make(inputs, width) for _ in range(directions)))
        self.head = nn.Linear(directions * width, width)

    def forward(self, inputs_TBH: Tensor, target_BH: Tensor) -> Tensor:
        """The mean squared error of the prediction."""
        sequence = list(inputs_TBH.unbind(0))
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            sequence = self._run(layer, sequence)
        last_BH = sequence[-1]
        if self.bidirectional:  # each direction ends at the other end of time
            last_BH = torch.cat([last_BH[:, : self.width], sequence[0][:, self.width :]], dim=1)
        return F.mse_loss(self.head(last_BH), target_BH)

    @staticmethod
    def _run(layer: nn.ModuleList, sequence: list[Tensor]) -> list[Tensor]:
        ahead = layer[0]
        assert isinstance(ahead, TanhCell | LstmCell)
        states = ahead.scan(sequence)
        if len(layer) == 1:
            return states
        back = layer[1]
        assert isinstance(back, TanhCell | LstmCell)
        reversed_states = back.scan(sequence[::-1])[::-1]
        return [torch.cat(pair, dim=1) for pair in zip(states, reversed_states, strict=True)]

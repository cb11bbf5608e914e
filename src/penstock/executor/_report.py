"""What a planned step did, next to what its plan says."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.tables import report_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionReport:
    """Predicted and measured, of the steps since the plan was bound; medians of the steps."""

    num_steps: int
    """Steps that were finished."""
    num_operators: int
    """Operators of a step, those that run again included."""
    step_seconds: float
    """Median time of a step; without the first one, if there are more."""
    predicted_step_seconds: float
    """As the plan's simulation has it."""
    phase_seconds: dict[str, float]
    """Of a step: forward, backward and optimizer, with what each waited; measured in the first five
    steps after the first one, and empty before."""
    predicted_phase_seconds: dict[str, float]
    """As the plan's simulation has it."""
    stall_seconds: float
    """Of a step: time for which the computation waited for transfers."""
    predicted_stall_seconds: float
    """As the plan's simulation has it."""
    moved_bytes: dict[str, int]
    """Of a step, for each link."""
    predicted_moved_bytes: dict[str, int]
    """As the plan has it."""
    bytes_per_second: dict[str, float]
    """Of each link while it was busy."""
    predicted_bytes_per_second: dict[str, float]
    """As the machine's profile has it."""
    arena_bytes: int
    """Device memory for values."""
    workspace_bytes: int
    """Device memory that operators may take beyond that: what kernels are declared to need, and
    results on their way to their places."""
    held_bytes: int | None
    """What both take of a GPU, in segments of torch's allocator (`torch.cuda.memory_reserved`): of
    whole 2 MiB, at least 20 below 10 MiB, and one for small tensors. None on CPUs."""
    host_bytes: int
    """Host memory of copies."""
    undo_bytes: int
    """Copies of what a step changes before it is known that it will be done, as running statistics
    and queues: beyond 4 MiB in host memory, or in the file where there is a store."""
    predicted_host_bytes: int
    """Their most at any time, as the plan has it."""
    file_bytes: int
    """File space of copies."""
    predicted_file_bytes: int
    """Their most at any time, as the plan has it."""
    num_copied_results: int
    """Operators of a step whose results are copied to their places, as torch cannot write there."""
    direct_io: bool | None
    """Whether the file is read and written past the page cache; None without a file."""
    is_refined: bool
    """Whether the plan was made with times of earlier steps (`penstock.planner.refine`)."""
    debug: bool
    """Whether freed bytes are overwritten and transfers compared."""
    num_shadow_steps: int = 0
    """Steps whose loss was compared with that of the program itself, called eagerly before them."""
    num_captures_again: int = 0
    """Steps before which the program was called on tensors without data, and compared operator by
    operator with what was captured."""
    shadow_seconds: float = 0.0
    """What both took, of all steps; not part of `step_seconds`."""
    shadow_left_out: str = ""
    """Why losses are not compared with eager ones; empty where they are."""
    num_recorded: int = 0
    """Operators of a step that a GPU replays from CUDA graphs."""
    operator_seconds: tuple[float | None, ...] = ()
    """Of each operator of the planned graph, measured in the same steps; None where nothing runs.
    `penstock.planner.refine` takes them up."""

    @property
    def disk_alone_seconds(self) -> float:
        """What the transfers of a step with the file take one after the other, as measured."""
        rates = self.bytes_per_second
        moved = self.moved_bytes.items()
        return sum(n / rates[link] for link, n in moved if "file" in link and rates[link])

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [
            (field.name, getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name != "operator_seconds"
        ]
        rows.append(("disk_alone_seconds", self.disk_alone_seconds))
        return report_table(rows, title="penstock.bind")

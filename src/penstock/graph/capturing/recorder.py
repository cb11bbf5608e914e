"""Writes down every operator that torch runs, with the storages and versions that it touches.

It is a dispatch mode on top of a `FakeTensorMode`: what it sees is what a kernel would be called
with, below autograd, autocast and decompositions into other operators; nothing is computed.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import CaptureError
from penstock.graph._expressions import Expression, views_of
from penstock.graph._user_line import user_line
from penstock.graph.capturing._constant_propagation import KnownValues
from penstock.graph.capturing._fake_results import SYMBOLS, run_fake
from penstock.graph.capturing._traced_numbers import ScalarNode, traced_float
from penstock.graph.capturing.schemas import Schema, draws, schema_of, writes_nothing
from penstock.graph.costs.counts import Facts, facts_of, touched_bytes
from penstock.graph.encoding import (
    CONSTANT,
    EMPTY,
    FULL,
    GET_RNG_STATE,
    SCALAR,
    SET_RNG_STATE,
    dtype_name,
    encode_bytes,
    encode_constant,
)
from penstock.graph.step_graph import Kind, Phase, TensorView

aten = torch.ops.aten

_MAX_CONSTANT_BYTES = 2**16  # of a tensor that the program makes from Python numbers
_REFUSED = ("aten.set_.", "aten.resize_.", "aten.set_data.", "aten.resize_as_.")
_ROW_BY_ROW = (
    *("_softmax", "_log_softmax"),
    *("_softmax_backward_data", "_log_softmax_backward_data"),
)
_FACTORIES: dict[str, float | str | None] = {  # the number, or the argument that has it
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    **dict.fromkeys(("full", "full_like", "new_full"), "fill_value"),
    "scalar_tensor": "s",
}


@dataclass(slots=True)
class Block:
    """A storage that is being written down."""

    name: str
    num_bytes: int
    kind: Kind
    initial: int | None
    current: int
    handle: torch.UntypedStorage | None  # kept, so that no other storage gets its identity
    is_half: bool = False


@dataclass(slots=True)
class Draft:
    """An operator that is being written down; the fields are those of `Operator`."""

    name: str
    target: str
    phase: Phase
    module: str = ""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[TensorView | None, ...] = ()
    reads: list[int] = field(default_factory=list)
    creates: list[int] = field(default_factory=list)
    mutates: list[tuple[int, int]] = field(default_factory=list)
    overwrites: list[tuple[int, int]] = field(default_factory=list)
    random: bool = False
    side_effect: bool = False
    facts: Facts = field(default_factory=Facts)
    dropped: list[int] = field(default_factory=list)  # results that nobody uses


class Recorder(TorchDispatchMode):
    """Writes operators down while it is active, on top of a fake tensor mode.

    Args:
        module_name: Returns the qualified name of the module that is running.
        replaced: Real tensors that have stand-ins; who uses one itself has got past these.
    """

    def __init__(
        self,
        module_name: Callable[[], str] = lambda: "",
        replaced: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._replaced = {each.untyped_storage()._cdata for each in replaced}
        self._lifted: dict[int, torch.Tensor] = {}  # real tensors from outside of the step, by id
        self._outside: set[int] = set()  # blocks that are copies of them
        self.outside: dict[str, torch.Tensor] = {}  # the same tensors by the names of these copies
        self.looked_at: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}
        self._masks: set[str] = set()  # of the batch, that mask nothing
        self.full_masks: set[str] = set()  # those of them that the program has looked at
        self.watch: Callable[[Draft], None] | None = None  # is shown what is written down
        self.blocks: list[Block] = []
        self.block_of_value: list[int] = []
        self.drafts: list[Draft] = []
        self.phase = Phase.FORWARD
        self.guards: list[tuple[Expression, bool]] = []
        self._module_name = module_name
        self._block_of_handle: dict[int, int] = {}
        self._module_of_node: dict[int, str] = {}
        self._num_of_name: dict[str, int] = {}
        self._concrete: dict[float, ScalarNode] = {}
        self._paused = False
        self._known = KnownValues()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to guard every operator against it takes time."""
        return False

    # What the step begins with.

    def adopt(
        self, tensor: torch.Tensor, name: str, kind: Kind, *, on_device: bool = True
    ) -> TensorView:
        """Take up a tensor that is there before the step begins.

        Args:
            tensor: A fake tensor.
            name: Name of its storage, if that is new.
            kind: What it holds.
            on_device: False for what the host keeps, as the step counts of an optimizer.

        Returns:
            The view; other tensors of the same storage get the same value.
        """
        storage = tensor.untyped_storage()
        if storage._cdata not in self._block_of_handle:
            num_bytes = storage.nbytes() if on_device else 0
            index = self._add_block(name, num_bytes, kind, storage, initial=True)
            self.blocks[index].is_half = tensor.dtype in (torch.bfloat16, torch.float16)
        return self.view(tensor)

    def adopt_number(self, name: str, hint: float) -> torch.SymFloat:
        """Take up a Python number that may be another one at the next step."""
        block = self._add_block(name, 0, Kind.SCALAR, None, initial=True)
        view = TensorView(self.blocks[block].current, "float64", (), (), 0)
        return traced_float(view, hint, self)

    def view(self, tensor: torch.Tensor) -> TensorView:
        """Return how a tensor looks at the current value of its storage."""
        block = self._block_of_handle.get(tensor.untyped_storage()._cdata)
        if block is None:
            raise CaptureError(
                f"{user_line()}: a tensor of shape {tuple(tensor.shape)} is used that an earlier "
                "call of the program has made and kept; keep it in a buffer (register_buffer). If "
                "only the first call makes it, call the model once before"
            )
        return TensorView(
            self.blocks[block].current,
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def knows(self, tensor: torch.Tensor) -> bool:
        """Tell if the tensor's storage has been written down."""
        return tensor.untyped_storage()._cdata in self._block_of_handle

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Tell if the tensor's elements are known, and no data can change them."""
        known = self.knows(tensor) and self._known.knows(self.view(tensor))
        return known and not self._masks_of(tensor)

    def note_mask(self, tensor: torch.Tensor, real: torch.Tensor, name: str) -> None:
        """Take note of a mask in the batch that masks nothing."""
        (value,) = {self.view(tensor).value}
        with no_dispatch():
            self._known.set(value, real.detach().cpu().contiguous())
        self._known.note_source([value], name)
        self._masks.add(name)

    def follows_full_mask(self, tensor: torch.Tensor) -> bool:
        """Tell if a tensor comes from such a mask alone, and its bits may depend on the branch that
        a program takes for it: kernels of half precision round in other places.

        The step is then one for such masks.
        """
        if not (self.knows(tensor) and self._known.knows(self.view(tensor))):
            return False
        masks = self._masks_of(tensor)
        halves = any(
            block.kind is Kind.PARAMETER and block.is_half for block in self.blocks
        ) or torch.is_autocast_enabled(tensor.device.type)
        if masks and halves:
            self.full_masks |= masks
        return bool(masks) and halves

    def _masks_of(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._known.sources(self.view(tensor)) & self._masks

    def block(self, tensor: torch.Tensor) -> Block:
        """Return the block of a tensor's storage."""
        return self.blocks[self._block_of_handle[tensor.untyped_storage()._cdata]]

    def _add_block(
        self,
        name: str,
        num_bytes: int,
        kind: Kind,
        storage: torch.UntypedStorage | None,
        *,
        initial: bool = False,
    ) -> int:
        index, value = len(self.blocks), len(self.block_of_value)
        self.block_of_value.append(index)
        self.blocks.append(Block(name, num_bytes, kind, value if initial else None, value, storage))
        if storage is not None:
            self._block_of_handle[storage._cdata] = index
        return index

    # Operators.

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let operators run without writing them down."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._number_of(args[0], func)
        if func.namespace == "prim":
            return _told(func, args, kwargs)
        schema = schema_of(func)
        if schema.composite:
            with self:
                result = _decomposed(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if schema.target.startswith(_REFUSED):
            raise CaptureError(
                f"{user_line()}: {schema.target} changes what memory a tensor has, which a step "
                "graph cannot say; make a new tensor instead"
            )
        is_literal = func._opname.startswith("lift")
        args = tuple(self._lift(value, is_literal) for value in args)
        kwargs = {name: self._lift(value, is_literal) for name, value in kwargs.items()}
        if schema.returns_first and self.phase is Phase.OPTIMIZER and args[0].dim():
            result = args[0]  # an update in place: there is nothing to find out about the result
        else:
            result = run_fake(func, args, kwargs)
        self._write_down(func, schema, args, kwargs, result)
        return result

    def has_lifted(self, tensor: object) -> bool:
        """Tell if a real tensor from outside of the step has been used in it."""
        return id(tensor) in self._lifted

    def _lift(self, value: Any, is_literal: bool) -> Any:
        """Turn a real tensor among the arguments into a constant of the graph."""
        if type(value) is torch.Tensor or isinstance(value, torch.nn.Parameter):
            if isinstance(value, FakeTensor) or hasattr(value, "_wrapped_number"):
                return value
            if not is_literal:
                self._note_outside(value)
            return self._constant(value, is_outside=not is_literal)
        if type(value) in (list, tuple):
            return type(value)(self._lift(each, is_literal) for each in value)
        return value

    def _note_outside(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor that was there before the step, and is not the model's."""
        if tensor.untyped_storage()._cdata in self._replaced:
            raise CaptureError(
                f"{user_line()}: a tensor of shape {tuple(tensor.shape)} is used that looks at a "
                "parameter or buffer past the model; use the model's own attribute"
            )
        self._lifted[id(tensor)] = tensor

    def _constant(self, tensor: torch.Tensor, *, is_outside: bool) -> torch.Tensor:
        num_bytes = tensor.numel() * tensor.element_size()
        if tensor.is_meta or num_bytes > _MAX_CONSTANT_BYTES:
            raise CaptureError(
                f"{user_line()}: a tensor of shape {tuple(tensor.shape)} ({num_bytes} bytes) is "
                "used that is neither a parameter, a buffer nor part of the batch; register it "
                "with register_buffer(..., persistent=False), or make it in forward()"
            )
        draft = self._new_draft(CONSTANT, "constant")
        with no_dispatch():
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            draft.args = (encode_bytes(copy),)
        fake = torch.ops.aten.lift_fresh.default(copy)
        self._add_outputs(draft, [fake])
        if is_outside:
            self._outside.add(self._block_of_handle[fake.untyped_storage()._cdata])
            self.outside[draft.name] = tensor
            self._known.note_source(draft.creates, draft.name)
        self._append(draft)
        return fake

    def _write_down(
        self,
        func: Any,
        schema: Schema,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        outputs = _results_of(result)
        written = _written(schema, args, kwargs)
        for tensor in outputs:
            if tensor is not None and (tensor.layout is not torch.strided or tensor.is_complex()):
                raise CaptureError(
                    f"{user_line()}: a tensor of layout {tensor.layout} and {tensor.dtype} cannot "
                    "be captured; use dense tensors of real numbers (for embeddings sparse=False, "
                    "for complex ones torch.view_as_real), or train under penstock.offload"
                )
        new = any(tensor is not None and not self.knows(tensor) for tensor in outputs)
        if schema.changes_view or not (new or written or schema.side_effect):
            return  # a view, or a question about a tensor
        if func._opname in _FACTORIES and isinstance(result, torch.Tensor):
            self._make_filled(func, args, kwargs, result)
            return
        draft = self._new_draft(schema.target, func._opname.strip("_"))
        draft.random = draws(func, args, kwargs)
        draft.side_effect = schema.side_effect
        reads: dict[int, None] = {}
        draft.args = tuple(self._encode(value, reads) for value in args)
        draft.kwargs = {name: self._encode(value, reads) for name, value in kwargs.items()}
        self._forbid_lost_numbers()
        draft.facts = facts_of(func, args, kwargs, result, written)
        for tensor in written:
            self._mutate(draft, tensor)
        old = {pair[0] for pair in draft.mutates}
        draft.reads = [value for value in reads if value not in old]
        self._add_outputs(draft, outputs)
        in_place = schema.pointwise or _row_by_row(func, args)
        if in_place and schema.has_out and isinstance(result, torch.Tensor):
            operands = [*_results_of(args), *_results_of(tuple(kwargs.values()))]
            self._add_overwrites(draft, result, operands)
        self._append(draft)

    def _make_filled(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
    ) -> None:
        """Write down a tensor full of one number; its likeness with another one is no need of it.

        `zeros_like(x)` reads no byte of x, and x need not be there.
        """
        fill = _FACTORIES[func._opname]
        if isinstance(fill, str):
            names = [argument.name for argument in func._schema.arguments]
            place = names.index(fill)
            fill = args[place] if place < len(args) else kwargs[fill]
        draft = self._new_draft(EMPTY if fill is None else FULL, func._opname)
        reads: dict[int, None] = {}
        if fill is not None:
            draft.args = (self._encode(fill, reads),)
            draft.facts = Facts(bytes_written=touched_bytes(result))
        draft.reads = list(reads)
        self._add_outputs(draft, [result])
        self._append(draft)

    def _append(self, draft: Draft) -> None:
        self.drafts.append(draft)
        if self.watch is not None:
            self.watch(draft)
        if self.phase is Phase.FORWARD and not (draft.random or draft.target == SCALAR):
            creates = [
                (value, self.blocks[self.block_of_value[value]].num_bytes)
                for value in draft.creates
            ]
            self._known.follow(
                *(draft.target, draft.args, draft.kwargs, draft.reads, draft.mutates),
                *(draft.outputs, creates),
            )

    def _new_draft(self, target: str, base: str) -> Draft:
        return Draft(self._unique(base), target, self.phase, self._module())

    def _unique(self, base: str) -> str:
        num = self._num_of_name[base] = self._num_of_name.get(base, -1) + 1
        return f"{base}_{num}" if num else base

    def _module(self) -> str:
        """Name the running module; in the backward pass the one whose gradient is calculated."""
        if self.phase is Phase.FORWARD:
            name = self._module_name()
            # The node of the operator that runs was made just before.
            node = torch.autograd._get_sequence_nr() - 1  # pyright: ignore
            self._module_of_node.setdefault(node, name)
            return name
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        return self._module_of_node.get(node._sequence_nr(), self._module_name())

    def _mutate(self, draft: Draft, tensor: torch.Tensor) -> None:
        block = self.block(tensor)
        if self._block_of_handle[tensor.untyped_storage()._cdata] in self._outside:
            raise CaptureError(
                f"{user_line()}: a tensor of shape {tuple(tensor.shape)} is changed in place that "
                "was there before the step and is neither a parameter nor a buffer, so that it "
                "would change in this step only: register it with register_buffer()"
            )
        if any(pair[1] == block.current for pair in draft.mutates):
            return  # two views of one storage
        new = len(self.block_of_value)
        self.block_of_value.append(self.block_of_value[block.current])
        draft.mutates.append((block.current, new))
        block.current = new

    def _add_outputs(self, draft: Draft, outputs: list[torch.Tensor | None]) -> None:
        for number, tensor in enumerate(outputs):
            if tensor is not None and not self.knows(tensor):
                storage = tensor.untyped_storage()
                name = f"{draft.name}.{number}" if number else draft.name
                block = self._add_block(name, storage.nbytes(), Kind.ACTIVATION, storage)
                draft.creates.append(self.blocks[block].current)
        draft.outputs = tuple(None if tensor is None else self.view(tensor) for tensor in outputs)

    def _add_overwrites(
        self, draft: Draft, result: torch.Tensor, operands: list[torch.Tensor | None]
    ) -> None:
        """Find operands in whose place the result may be written, element over element.

        Not where an operand is also looked at in another way: `x + x.T` must find x whole.
        """
        if not draft.creates or draft.mutates:
            return
        place = self.view(result)
        views: defaultdict[int, set[TensorView]] = defaultdict(set)
        for tensor in operands:
            if tensor is not None and self.knows(tensor):
                view = self.view(tensor)
                views[view.value].add(view)
        num_bytes = result.untyped_storage().nbytes()
        for value, (view, *others) in views.items():
            whole = self.blocks[self.block_of_value[value]].num_bytes == num_bytes > 0
            if whole and not others and view == place._replace(value=value):
                draft.overwrites.append((value, draft.creates[0]))

    def _encode(self, value: Any, reads: dict[int, None]) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            node = self._concrete.pop(value, None) if self._concrete else None
            return value if node is None else self._encode_number(node, reads)
        if isinstance(value, torch.Tensor):
            wrapped = getattr(value, "_wrapped_number", None)
            if wrapped is not None:
                return self._encode_number(wrapped.node, reads)
            view = self.view(value)
            reads[view.value] = None
            return view
        if isinstance(value, SYMBOLS):
            return self._encode_number(value.node, reads)
        if isinstance(value, (list, tuple)):
            return tuple(self._encode(item, reads) for item in value)
        plain = encode_constant(value)
        if plain is None:
            raise CaptureError(
                f"{user_line()}: an operator has an argument of type {type(value).__name__} "
                f"({value!r}), which cannot be written down; generators: use the default one"
            )
        return plain

    # Numbers.

    def _encode_number(self, node: Any, reads: dict[int, None]) -> Mapping[str, Any]:
        for view in views_of(node.expression):
            reads[view.value] = None
        return {"scalar": node.expression}

    def _number_of(self, tensor: torch.Tensor, func: Any) -> Any:
        """Answer `tensor.item()`: possible for the optimizer's own counters only."""
        if not isinstance(tensor, FakeTensor):
            self._look_at(tensor)
            with no_dispatch():
                return func(tensor)
        known = self.knows(tensor)
        block = self.block(tensor) if known else None
        if block is not None and block.kind is Kind.OPTIMIZER_STATE and block.num_bytes == 0:
            draft = self._new_draft(SCALAR, "number")
            view = self.view(tensor)
            draft.args, draft.reads = (view,), [view.value]
            index = self._add_block(draft.name, 0, Kind.SCALAR, None)
            value = self.blocks[index].current
            draft.creates = [value]
            draft.outputs = (TensorView(value, view.dtype, (), (), 0),)
            self._append(draft)
            return traced_float(draft.outputs[0], 2.0, self)
        masks = self._masks_of(tensor) if known else frozenset()
        is_decided = masks <= self.full_masks and tensor.dtype is torch.bool
        if known and self._known.knows(self.view(tensor)) and (not masks or is_decided):
            for name in self._known.sources(self.view(tensor)) - masks:
                self._look_at(self.outside[name])
            with no_dispatch():
                return func(self._known.tensor(self.view(tensor)))
        if tensor.constant is not None:
            with no_dispatch():
                return func(tensor.constant)
        raise CaptureError(
            f"{user_line()}: the program asks for a number that only the data can tell (item(), "
            "bool(), float(), tolist() or an if on a tensor); a captured step has one course of "
            "events: keep the number a tensor, as with torch.where, or move this out of the step"
        )

    def _look_at(self, tensor: torch.Tensor) -> None:
        """Note that the course of the step depends on a real tensor's numbers."""
        with no_dispatch():
            content = tensor.detach().clone()
        self.looked_at.setdefault(id(tensor), (tensor, content, user_line()))

    def decide(self, node: ScalarNode) -> bool:
        """Take a branch on a hyper-parameter, and note that it has to stay the same."""
        starts = {self._hyper_parameter(view) for view in views_of(node.expression)}
        if False in starts:
            raise CaptureError(
                f"{user_line()}: the optimizer branches on a step count or another number of its "
                "state, so that its steps differ; use an optimizer whose steps are alike, as SGD, "
                "Adam, AdamW, Adagrad"
            )
        self.guards.append((node.expression, bool(node.hint)))
        return bool(node.hint)

    def _hyper_parameter(self, view: TensorView) -> bool:
        return self.blocks[self.block_of_value[view.value]].initial == view.value

    def concrete(self, node: ScalarNode) -> float:
        """Return a float that only this number has, to find it again among the next arguments.

        Operators such as the fused optimizers take a `float`, through which nothing can be traced.
        """
        value = float(node.hint)
        while value in self._concrete or value == node.hint:
            value = math.nextafter(value, math.inf)
        self._concrete[value] = node
        return value

    def _forbid_lost_numbers(self) -> None:
        if self._concrete:
            self._concrete.clear()
            raise CaptureError(
                f"{user_line()}: a learning rate or step count becomes a plain Python number "
                "(float(), math.sqrt()), so that a change of it would go unnoticed; calculate "
                "with + - * / ** only"
            )

    # Random state.

    def get_rng_state(self) -> torch.Tensor:
        """Stand in for `torch.get_rng_state` during the capture."""
        return self._rng_state(5056)

    def get_cuda_rng_state(self, device: object = "cuda") -> torch.Tensor:
        """Stand in for `torch.cuda.get_rng_state` during the capture."""
        return self._rng_state(16, "cuda")

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Stand in for `torch.set_rng_state` during the capture."""
        self._set_rng_state(state)

    def set_cuda_rng_state(self, state: torch.Tensor, device: object = "cuda") -> None:
        """Stand in for `torch.cuda.set_rng_state` during the capture."""
        self._set_rng_state(state, "cuda")

    def _rng_state(self, num_bytes: int, *generator: str) -> torch.Tensor:
        draft = self._new_draft(GET_RNG_STATE, "get_rng_state")
        draft.args = generator
        with self.paused():
            state = torch.empty(num_bytes, dtype=torch.uint8)
        index = self._add_block(draft.name, 0, Kind.SCALAR, state.untyped_storage())
        draft.creates = [self.blocks[index].current]
        draft.outputs = (self.view(state),)
        draft.random = True
        self._append(draft)
        return state

    def _set_rng_state(self, state: torch.Tensor, *generator: str) -> None:
        if not self.knows(state):
            raise CaptureError(
                f"{user_line()}: the random state is set to one that was not taken in this step"
            )
        draft = self._new_draft(SET_RNG_STATE, "set_rng_state")
        view = self.view(state)
        draft.args, draft.reads = (view, *generator), [view.value]
        draft.random = draft.side_effect = True
        self._append(draft)


def _told(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a question about a tensor; that for its device, which most are, without asking."""
    if func is torch.ops.prim.device.default:
        tensor = args[0]
        if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
            return tensor.fake_device
    return func(*args, **kwargs)


def _row_by_row(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell if a softmax or its gradient may be written over an operand.

    The CPU kernels over the last dimension have read a row when they write it, element by element.
    """
    if func._opname not in _ROW_BY_ROW or args[0].device.type != "cpu":
        return False
    dim = args[2] if func._opname.endswith("_backward_data") else args[1]
    return dim % max(args[0].dim(), 1) == max(args[0].dim(), 1) - 1


def _decomposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return func.decompose(*args, **kwargs)
    except RuntimeError as error:
        if "data is not allocated yet" not in str(error):
            raise
        raise CaptureError(
            f"{user_line()}: the course of {func} depends on the data; a captured step has one "
            "course of events: pass numbers instead of tensors, or do this outside of the step"
        ) from error


def _results_of(result: Any) -> list[torch.Tensor | None]:
    """Flatten what an operator returned; None for a result that was not asked for."""
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in _results_of(item)]
    return [result if isinstance(result, torch.Tensor) else None]


def _written(
    schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    if not (schema.written or schema.written_names) or writes_nothing(schema, args):
        return []
    values: Iterable[Any] = [args[position] for position in schema.written if position < len(args)]
    values = [*values, *(kwargs[name] for name in schema.written_names if name in kwargs)]
    found = [tensor for value in values for tensor in _results_of(value)]
    return [tensor for tensor in found if tensor is not None]

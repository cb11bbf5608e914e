"""The recorder: a dispatch mode that records every operator which a step runs.

It lies on top of a `FakeTensorMode`: it sees the calls that kernels would get, below autograd,
autocast and decompositions into other operators, and nothing is computed.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from penstock.compat.autograd import current_node, next_sequence_number
from penstock.compat.dispatch import TorchDispatchMode, no_dispatch
from penstock.compat.fake_tensors import FakeTensor
from penstock.graph.capturing._constants import ConstantValues, OutsideTensors, copy_constant
from penstock.graph.capturing._drafts import Draft, StorageTable
from penstock.graph.capturing._fake_results import SYMBOLS, KnownCall, decompose, run_fake
from penstock.graph.capturing._program_lines import error_here, validation_remedy
from penstock.graph.capturing._traced_numbers import NumberTracer, ScalarNode
from penstock.graph.capturing.schemas import (
    Schema,
    is_random_call,
    is_softmax_in_place,
    schema_of,
    writes_nothing,
)
from penstock.graph.costs.counts import OperatorCounts, count_operator, touched_bytes
from penstock.graph.encoding import (
    CONSTANT,
    EMPTY,
    FULL,
    SCALAR,
    encode_bytes,
    encode_constant,
    flat_results,
)
from penstock.graph.step_graph import Kind, Phase, TensorView, views_in

aten = torch.ops.aten

_NEVER_LIFTED = {FakeTensor, bool, int, float, str, type(None)}
_REFUSED = ("aten.set_.", "aten.resize_.", "aten.set_data.", "aten.resize_as_.")
_FACTORIES: dict[str, float | str | None] = {  # the number, or the argument that has it
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    **dict.fromkeys(("full", "full_like", "new_full"), "fill_value"),
    "scalar_tensor": "s",
}


class Recorder(TorchDispatchMode):
    """Records operators while it is active, on top of a fake tensor mode.

    Attributes:
        storages: Storages of the step.
        drafts: The operators, in the order of the program.
        numbers: Numbers that change from step to step, and the branches on them.
        outside: Tensors that are neither the model's nor the batch's.
        full_masks: Masks of the batch that mask nothing, and whose numbers the program has used.
        phase: The part of the step that is running.
        device: The type of the device that the step is for. What it makes on another, as on the
            CPU in a step on a GPU, stays there and has no planned bytes.
        watch: Called with each operator that is recorded.
    """

    def __init__(
        self,
        module_name: Callable[[], str] = lambda: "",
        replaced: Iterable[torch.Tensor] = (),
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.device = device
        self.storages = StorageTable()
        self.drafts: list[Draft] = []
        self.numbers = NumberTracer(self.storages)
        self.outside = OutsideTensors(replaced)
        self.full_masks: set[str] = set()
        self.phase = Phase.FORWARD
        self.watch: Callable[[Draft], None] | None = None
        self._constants = ConstantValues()
        self._masks: set[str] = set()  # of the batch, that mask nothing
        self._module_name = module_name
        self._module_of_node: dict[int, str] = {}
        self._num_of_name: dict[str, int] = {}
        self._is_paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and guarding every operator takes time."""
        return False

    # What the step begins with.

    def adopt(
        self, tensor: torch.Tensor, name: str, kind: Kind, *, on_device: bool = True
    ) -> TensorView:
        """Add a fake tensor that is there before the step begins, `on_device` unless it stays on
        the host, as an optimizer's step counts; other tensors of its storage get the same value.
        """
        if tensor not in self.storages:
            storage = tensor.untyped_storage()
            num_bytes = storage.nbytes() if on_device else 0
            self.storages.add(name, num_bytes, kind, storage, is_initial=True)
            added = self.storages.of(tensor)
            added.is_half = tensor.dtype in (torch.bfloat16, torch.float16)
            added.is_on_host = self.is_on_host(tensor) and not on_device
        return self.storages.view(tensor)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the CPU in a step on a GPU."""
        return tensor.device.type == "cpu" != self.device

    def adopt_number(self, name: str, hint: float) -> torch.SymFloat:
        """Add a Python number that may be another one at the next step."""
        value = self.storages.add(name, 0, Kind.SCALAR, None, is_initial=True)
        return self.numbers.trace(TensorView(value, "float64", (), (), 0), hint)

    def adopt_mask(self, tensor: torch.Tensor, real: torch.Tensor, name: str) -> None:
        """Note that a tensor of the batch is a mask that masks nothing."""
        value = self.storages.view(tensor).value
        with no_dispatch():
            content = real.detach().cpu().contiguous()
            self._constants.memory[value] = content.untyped_storage()
        self._constants.sources[value] = frozenset([name])
        self._masks.add(name)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's elements are known, and no data can change them."""
        return self._masks_of(tensor) == frozenset()

    def has_kept_constants(self) -> bool:
        """Return whether a tensor may still be held somewhere that is constant."""
        storages = self.storages
        return any(
            storages.of_value(value).is_held()
            for value in self._constants.memory
            if self._constants.sources[value].isdisjoint(self._masks)
        )

    def constant_tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the real tensor that a constant stands for; None for all others, and for those of
        a device that is not here.
        """
        device = tensor.device
        if not self.is_constant(tensor) or (device.type != "cpu" and not torch.cuda.is_available()):
            return None
        with no_dispatch():
            return self._constants.tensor(self.storages.view(tensor)).to(device)

    def follows_full_mask(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's bits may depend on the branch that a program takes for a mask.

        It is computed from masks alone that mask nothing, and kernels of half precision round in
        other places. The step is then one for such masks.
        """
        masks = self._masks_of(tensor)
        halves = any(
            storage.kind is Kind.PARAMETER and storage.is_half for storage in self.storages.storages
        ) or torch.is_autocast_enabled(tensor.device.type)
        if masks and halves:
            self.full_masks |= masks
        return bool(masks) and halves

    def _masks_of(self, tensor: torch.Tensor) -> frozenset[str] | None:
        """Return the masks that a constant is computed from; None if the tensor is no constant."""
        value = self.storages.of(tensor).current if tensor in self.storages else None
        if value is None or value not in self._constants.memory:
            return None
        return self._constants.sources[value] & self._masks

    # Operators.

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let operators run without recording them."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._read_number(args[0], func)
        if func.namespace == "prim":
            return _answer(func, args, kwargs)
        schema = schema_of(func)
        if schema.composite:
            with self:
                result = decompose(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if schema.target.startswith(_REFUSED):
            raise error_here(
                f"{schema.target} changes what memory a tensor has, which a step graph cannot "
                "say; make a new tensor instead"
            )
        is_literal = func._opname.startswith("lift")
        args = tuple([self._lift(value, is_literal) for value in args])
        kwargs = {name: self._lift(value, is_literal) for name, value in kwargs.items()}
        if schema.returns_first and self.phase is Phase.OPTIMIZER and args[0].dim():
            # An update in place: there is nothing to find out about the result.
            result, known = args[0], None
        else:
            result, known = run_fake(func, args, kwargs)
        self._record(func, schema, args, kwargs, result, known)
        return result

    def _lift(self, value: Any, is_literal: bool) -> Any:
        """Turn a real tensor among the arguments into a constant of the graph."""
        if type(value) in _NEVER_LIFTED:  # as most are
            return value
        if type(value) is torch.Tensor or isinstance(value, torch.nn.Parameter):
            if isinstance(value, FakeTensor) or hasattr(value, "_wrapped_number"):
                return value
            if not is_literal:
                self.outside.use(value)
            return self._make_constant(value, is_outside=not is_literal)
        if type(value) in (list, tuple):
            return type(value)(self._lift(each, is_literal) for each in value)
        return value

    def _make_constant(self, tensor: torch.Tensor, *, is_outside: bool) -> torch.Tensor:
        copy = copy_constant(tensor)
        draft = self.new_draft(CONSTANT, "constant")
        with no_dispatch():
            draft.args = (encode_bytes(copy),)
        fake = aten.lift_fresh.default(copy)
        self._add_outputs(draft, [fake])
        draft.is_outside = is_outside
        if is_outside:
            self.outside.add(draft.name, tensor, self.storages.index_of(fake))
            self._constants.sources[draft.creates[0]] = frozenset([draft.name])
        self.append(draft)
        return fake

    def _record(
        self,
        func: Any,
        schema: Schema,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        known: KnownCall | None,
    ) -> None:
        outputs = _flat_tensors(result)
        _check_layouts(outputs)
        written = _written_tensors(schema, args, kwargs)
        is_new = any(tensor is not None and tensor not in self.storages for tensor in outputs)
        if schema.changes_view or not (is_new or written or schema.side_effect):
            return  # a view, or a question about a tensor
        if func._opname in _FACTORIES and isinstance(result, torch.Tensor):
            self._record_factory(func, args, kwargs, result)
            return
        draft = self.new_draft(schema.target, func._opname.strip("_"))
        draft.random = is_random_call(func, args, kwargs)
        draft.side_effect = schema.side_effect
        reads: dict[int, None] = {}
        draft.args = tuple([self._encode(value, reads) for value in args])
        draft.kwargs = {name: self._encode(value, reads) for name, value in kwargs.items()}
        self.numbers.check_all_taken()
        counts = None if known is None else known.counts
        draft.counts = counts or count_operator(func, args, kwargs, result, written)
        if known is not None:
            known.counts = draft.counts
        for tensor in written:
            self._mutate(draft, tensor)
        old = {pair[0] for pair in draft.mutates}
        draft.reads = [value for value in reads if value not in old]
        self._add_outputs(draft, outputs)
        in_place = schema.pointwise or is_softmax_in_place(func, args)
        if in_place and schema.has_out and isinstance(result, torch.Tensor):
            operands = _flat_tensors([*args, *kwargs.values()])
            self._add_overwrites(draft, result, operands)
        self.append(draft)

    def _record_factory(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
    ) -> None:
        """Record a tensor full of one number, without the tensor whose form it takes.

        `zeros_like(x)` reads no byte of x, and x need not be there.
        """
        fill = _FACTORIES[func._opname]
        if isinstance(fill, str):
            names = [argument.name for argument in func._schema.arguments]
            place = names.index(fill)
            fill = args[place] if place < len(args) else kwargs[fill]
        draft = self.new_draft(EMPTY if fill is None else FULL, func._opname)
        reads: dict[int, None] = {}
        if fill is not None:
            draft.args = (self._encode(fill, reads),)
            draft.counts = OperatorCounts(bytes_written=touched_bytes(result))
        draft.reads = list(reads)
        self._add_outputs(draft, [result])
        self.append(draft)

    def new_draft(self, target: str, base: str) -> Draft:
        """Return an operator of this phase and module, with a name that begins with `base`."""
        num = self._num_of_name[base] = self._num_of_name.get(base, -1) + 1
        return Draft(f"{base}_{num}" if num else base, target, self.phase, self._current_module())

    def append(self, draft: Draft) -> None:
        """Add an operator behind the others."""
        self.drafts.append(draft)
        if self.watch is not None:
            self.watch(draft)
        if self.phase is Phase.FORWARD and not (draft.random or draft.target == SCALAR):
            self._constants.propagate(draft, lambda value: self.storages.of_value(value).real_bytes)

    def _current_module(self) -> str:
        """Name the running module; in the backward pass the one whose gradient is calculated."""
        if self.phase is Phase.FORWARD:
            name = self._module_name()
            # The node of the operator that runs was made just before.
            self._module_of_node.setdefault(next_sequence_number() - 1, name)
            return name
        node = current_node()
        if node is None:
            return ""
        return self._module_of_node.get(node._sequence_nr(), self._module_name())

    def _mutate(self, draft: Draft, tensor: torch.Tensor) -> None:
        self.outside.check_unchanged(self.storages.index_of(tensor), tensor)
        current = self.storages.of(tensor).current
        if all(new != current for _, new in draft.mutates):  # else: two views of one storage
            draft.mutates.append(self.storages.begin_value(tensor))

    def _add_outputs(self, draft: Draft, outputs: list[torch.Tensor | None]) -> None:
        for number, tensor in enumerate(outputs):
            if tensor is not None and tensor not in self.storages:
                storage = tensor.untyped_storage()
                name = f"{draft.name}.{number}" if number else draft.name
                is_on_host = self.is_on_host(tensor)
                num_bytes = 0 if is_on_host else storage.nbytes()
                value = self.storages.add(name, num_bytes, Kind.ACTIVATION, storage)
                self.storages.of_value(value).is_on_host = is_on_host
                draft.creates.append(value)
        draft.outputs = tuple(
            None if tensor is None else self.storages.view(tensor) for tensor in outputs
        )

    def _add_overwrites(
        self, draft: Draft, result: torch.Tensor, operands: list[torch.Tensor | None]
    ) -> None:
        """Find operands in whose place the result may be written, element over element.

        Not where an operand is also viewed in another way: `x + x.T` must find x whole.
        """
        if not draft.creates or draft.mutates:
            return
        place = self.storages.view(result)
        views: defaultdict[int, set[TensorView]] = defaultdict(set)
        for tensor in operands:
            if tensor is not None and tensor in self.storages:
                view = self.storages.view(tensor)
                views[view.value].add(view)
        num_bytes = result.untyped_storage().nbytes()
        for value, (view, *others) in views.items():
            is_whole = self.storages.of_value(value).num_bytes == num_bytes > 0
            if is_whole and not others and view == place._replace(value=value):
                draft.overwrites.append((value, draft.creates[0]))

    def _encode(self, value: Any, reads: dict[int, None]) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            node = self.numbers.take_plain(value)
            return value if node is None else _encode_number(node, reads)
        if isinstance(value, torch.Tensor):
            wrapped = getattr(value, "_wrapped_number", None)
            if wrapped is not None:
                return _encode_number(wrapped.node, reads)
            view = self.storages.view(value)
            reads[view.value] = None
            return view
        if isinstance(value, SYMBOLS):
            return _encode_number(value.node, reads)
        if isinstance(value, (list, tuple)):
            return tuple(self._encode(item, reads) for item in value)
        plain = encode_constant(value)
        if plain is None:
            raise error_here(
                f"an operator has an argument of type {type(value).__name__} ({value!r}), which "
                "cannot be written down; generators: use the default one"
            )
        return plain

    def _read_number(self, tensor: torch.Tensor, func: Any) -> Any:
        """Answer `tensor.item()`: possible for the optimizer's own counters and for constants."""
        if not isinstance(tensor, FakeTensor):
            self.outside.observe(tensor)
            with no_dispatch():
                return func(tensor)
        storage = self.storages.of(tensor) if tensor in self.storages else None
        if storage is not None and storage.kind is Kind.OPTIMIZER_STATE and not storage.num_bytes:
            return self._record_number(tensor)
        masks = self._masks_of(tensor)
        is_decided = not masks or (masks <= self.full_masks and tensor.dtype is torch.bool)
        if masks is not None and is_decided:
            view = self.storages.view(tensor)
            for name in self._constants.sources[view.value] - masks:
                self.outside.observe(self.outside.by_name[name])
            with no_dispatch():
                return func(self._constants.tensor(view))
        if tensor.constant is not None:
            with no_dispatch():
                return func(tensor.constant)
        module = self._current_module()
        raise error_here(
            f"the program asks{f' in module {module!r}' if module else ''} for a number that only "
            "the data can tell (item(), bool(), float(), tolist() or an if on a tensor); a "
            "captured step has one course of events: keep the number a tensor, as with "
            f"torch.where, or move this out of the step{validation_remedy()}"
        )

    def trace_count(self, tensor: torch.Tensor) -> torch.SymFloat:
        """Return the number of batches that a buffer has counted, as a traced number.

        Raises:
            CaptureError: It is on a device, which the step would have to wait for.
        """
        with self.pause():
            if tensor.device.type == "cpu" and self.storages.of(tensor).kind is Kind.BUFFER:
                return self._record_number(tensor)
        raise error_here(
            f"the batch norm {self._current_module()!r} with momentum=None reads its count of "
            f"batches, which is on {tensor.device.type}, so that the step would wait for it; give "
            "it a momentum, such as 0.1"
        )

    def _record_number(self, tensor: torch.Tensor) -> torch.SymFloat:
        draft = self.new_draft(SCALAR, "number")
        view = self.storages.view(tensor)
        draft.args, draft.reads = (view,), [view.value]
        value = self.storages.add(draft.name, 0, Kind.SCALAR, None)
        draft.creates = [value]
        number = TensorView(value, view.dtype, (), (), 0)
        draft.outputs = (number,)
        self.append(draft)
        return self.numbers.trace(number, 2.0)


def _encode_number(node: ScalarNode, reads: dict[int, None]) -> Mapping[str, Any]:
    reads.update((view.value, None) for view in views_in(node.expression))
    return {"scalar": node.expression}


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a question about a tensor; that for its device, which most are, without asking."""
    if func is torch.ops.prim.device.default:
        tensor = args[0]
        if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
            return tensor.fake_device
    return func(*args, **kwargs)


def _check_layouts(tensors: Iterable[torch.Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None and (tensor.layout is not torch.strided or tensor.dtype.is_complex):
            raise error_here(
                f"a tensor of layout {tensor.layout} and {tensor.dtype} cannot be captured; use "
                "dense tensors of real numbers (for embeddings sparse=False, for complex ones "
                "torch.view_as_real), or train under penstock.offload"
            )


def _flat_tensors(values: Any) -> list[torch.Tensor | None]:
    """Flatten results or arguments; None for everything but tensors."""
    if type(values) is FakeTensor:
        return [values]
    return [each if isinstance(each, torch.Tensor) else None for each in flat_results(values)]


def _written_tensors(
    schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    if not (schema.written or schema.written_names) or writes_nothing(schema, args):
        return []
    values = [args[position] for position in schema.written if position < len(args)]
    values += [kwargs[name] for name in schema.written_names if name in kwargs]
    return [tensor for tensor in _flat_tensors(values) if tensor is not None]

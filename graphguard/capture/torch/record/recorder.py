"""Records what a program does, operator by operator, on meta tensors."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphguard.aten.grouped import GROUPED, ends_of, is_defined, shape_of
from graphguard.aten.kernels import Kernels, constant_of, tensors_in
from graphguard.aten.operators import DTYPE_NAMES, DTYPES, Operator, operator
from graphguard.capture.torch.escapes.device import is_meta
from graphguard.capture.torch.escapes.memory import address_of
from graphguard.capture.torch.record import counts, scaling
from graphguard.capture.torch.record.aliasing import AliasTable, Cell
from graphguard.capture.torch.record.bodies import NotTraced, require_declared, trace_body
from graphguard.capture.torch.record.constants import ConstantFolder, NotConstant
from graphguard.capture.torch.record.invocation import Invocation
from graphguard.capture.torch.record.randomness import RandomState
from graphguard.capture.torch.record.separate import require_separate
from graphguard.capture.torch.record.shapes import META, SHAPES
from graphguard.capture.torch.record.views import ViewCall
from graphguard.capture.torch.sources import SourceTracker
from graphguard.capture.torch.world.races import RaceDetector
from graphguard.errors import CaptureError, ReadsValuesError
from graphguard.graph.ir import Arg, Constant, Graph, Node, Source, Symbol, Value

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE
_ALIASES = {"aten.detach.default", "aten.detach_.default", "aten.alias.default", "aten.lift_fresh.default"}
_SILENT_NAMESPACES = {"profiler"}
_COMMUNICATING = {"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
_RENAMES = {"aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.unsqueeze.default", "aten.t.default",
            "aten.transpose.int"}  # fmt: skip
_SELECTIONS = {"aten.index.Tensor", "aten.masked_select.default"}  # only the mask decides on the shape of the result
# It writes running statistics, which its schema does not say; its twin computes the same and says so.
_BATCH_NORM, _BATCH_NORM_TWIN = "aten.native_batch_norm.default", torch.ops.aten._native_batch_norm_legit.default


class Recorder(TorchDispatchMode):
    """Appends to `graph` while it is entered. Tensors of the program carry no data; see `tensor_input`."""

    supports_higher_order_operators = True  # in that they are refused in our words
    by_class = False  # whether it is recorded for many ranks at once
    _aliases: type[AliasTable] = AliasTable
    _kernels: type[Kernels] = Kernels

    def __init__(self, graph: Graph, *, use_cache: bool = True, opaque: Collection[str] = ()):
        super().__init__()
        self.graph, self.use_cache = graph, use_cache
        self.opaque = opaque  # operators with a lemma
        self.bodies: list[Operator] = []  # of operators that are being recorded
        self.sources = SourceTracker()
        self.aliases = self._aliases(self._emit_call, self._adopt)
        self.constants = ConstantFolder(graph, self._kernels())
        self.races = RaceDetector(graph)
        self.random_state = RandomState()
        self.assumptions: dict[str, None] = {}
        self.below: dict[str, int] = {}  # by whole-number input that is stated not to be negative, what it is below
        self.failure: CaptureError | None = None  # the first one, kept in case the program catches it
        self.is_program = False  # whether a rank's program runs, which may communicate, as its input relation may not
        self.next_work = 0
        self._adopted: list[tuple[torch.Tensor, Value]] = []
        self.coalesced: int | None = None  # the work id of a block of communication that is started as one
        self.results: dict[int, list[torch.Tensor]] = {}  # what each work fills, for those who ask for its future
        self._next_value = 0
        self._forms: dict[DeviceMesh, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._asked_device = False
        self.ended: int | None = None  # after how many operations the program ended torch.distributed
        self._names_devices = False  # whether the program named a device other than the CPU
        self._where: tuple[Source | None, bool] = (None, False)
        from graphguard.capture.torch.world.collectives import HANDLERS

        self.handlers: dict[str, Callable[..., Any]] = {**HANDLERS, **counts.HANDLERS, **scaling.HANDLERS}

    # ------------------------------------------------------------------ values
    def new_value(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        self._next_value += 1
        return Value(self._next_value - 1, tuple(shape), DTYPE_NAMES[dtype])

    def value(self, tensor: torch.Tensor) -> Value:
        """What the tensor holds now."""
        return self.aliases.read(self.aliases.cell(tensor))

    def tensor_input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor that the program is given."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=META)
        self.aliases.bind(tensor, self._new_input(name, shape, dtype))
        return tensor

    def rename_as_input(self, name: str, tensor: torch.Tensor) -> None:
        """From now on the tensor (a parameter, say) and all that share its memory hold the input `name`."""
        value = self._new_input(name, tensor.shape, tensor.dtype)
        if self.aliases.storage_of(tensor) is None:
            self.aliases.bind(tensor, value)
        else:
            self.aliases.write(self.aliases.cell(tensor), value)

    def _new_input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Value:
        value = self.graph.inputs[name] = self.new_value(shape, dtype)
        return value

    def new_constant(self, constant: Constant, dtype: torch.dtype) -> Value:
        value = self.new_value(constant.shape, dtype)
        self.graph.constants[value] = constant
        return value

    def _adopt(self, tensor: torch.Tensor) -> Value:
        """A tensor from outside the program: a constant, with its data."""
        value = self.new_constant(constant_of(tensor), tensor.dtype)
        self._adopted.append((tensor, value))
        return value

    def note_device(self, frame: FrameType) -> None:
        """The program asks on which device a tensor is."""
        if not self._asked_device:
            self._asked_device = True
            where = Source(frame.f_code.co_filename, frame.f_lineno)
            self.assume(f"the programs are captured as they run on the CPU: they ask for a tensor's device at {where}")

    def check_adopted(self) -> None:
        """Memory from outside must still hold what it held when it was first seen, as the graph says so. Writes of the
        program are recorded, not made; what changed it went around torch, through an array of numpy over it, say."""
        self._where = (None, False)
        end, written = 0, False
        for tensor, value in sorted(self._adopted, key=lambda item: address_of(item[0])):
            shared, is_written = address_of(tensor) < end, self.aliases.cell(tensor).storage.version > 0
            end, written = max(end, address_of(tensor) + tensor.nbytes), is_written or (shared and written)
            if (shared and written) or constant_of(tensor) != self.graph.constants[value]:
                raise self.failed(CaptureError(
                    f"the memory of a constant of shape {tuple(tensor.shape)} is changed through numpy or another tensor that "
                    "torch does not know to share it; give the program a copy (`torch.tensor(array)`)"
                ))  # fmt: skip

    # ------------------------------------------------------------------ nodes
    def emit(
        self,
        op: str,
        args: tuple[Arg, ...],
        kwargs: dict[str, Arg],
        outputs: tuple[Value, ...],
        writes: tuple[str, ...] = (),
    ) -> Node:
        node = Node(op, args, kwargs, outputs, *self._where, writes)
        self.graph.nodes.append(node)
        return node

    def _emit_call(self, call: ViewCall, operands: tuple[Value, ...], shape: torch.Size, dtype: torch.dtype) -> Value:
        value = self.new_value(shape, dtype)
        self.emit(call.op, (*operands, *call.args), {}, (value,))
        return value

    def number(self, number: int) -> Arg:
        """A whole number as an argument of a node."""
        return number

    def form_of(self, mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of a mesh, and its ranks."""
        if mesh not in self._forms:  # which makes its tensor of ranks anew for everyone who asks
            ranks = mesh.mesh
            self._forms[mesh] = tuple(ranks.shape), tuple(int(rank) for rank in ranks.reshape(-1).tolist())
        return self._forms[mesh]

    def assume(self, statement: str) -> None:
        self.assumptions[statement] = None

    def here(self) -> Source | None:
        """The line of the operation being recorded."""
        return self._where[0]

    def locate(self) -> None:
        """Note the current line; for what the program does outside of operators, such as waiting."""
        self._where = self.sources.here()

    # ------------------------------------------------------------------ dispatch
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(_FAKE_MODE) is not None:
            return func(*args, **kwargs)  # DTensor works out shapes on fake tensors of its own
        for kind in types:
            if kind not in _PLAIN:
                return NotImplemented  # a wrapper such as DTensor: it calls us back with what it holds
        try:
            self._where = self.sources.here()
            return self._dispatch(operator(func), args, kwargs)
        except CaptureError as error:
            self.failed(error)
            raise

    def _dispatch(self, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if info.namespace in _SILENT_NAMESPACES:
            return info.func(*args, **kwargs)
        handler = self.handlers.get(info.name)
        if handler is not None:
            return handler(self, info, args, kwargs)
        if info.name in _ALIASES:
            return self._alias(info, args)
        if info.composite:  # torch takes these apart itself, except in inference mode and inside handlers
            with self.resumed():
                return info.func.decompose(*args, **kwargs)
        if info.name == _BATCH_NORM and args[3] is not None and args[5]:
            info = operator(_BATCH_NORM_TWIN)
        if info.renames_dims:
            return self._rename_dims(info, args, kwargs)
        if info.reads_scalar:
            return self._read_scalar(info, args)
        if info.namespace in _COMMUNICATING:
            raise CaptureError(f"{info.name} communicates in a way that is not modelled; use torch.distributed's collectives")
        if info.custom and info.name not in self.opaque:
            try:
                return trace_body(self, info, args, kwargs)
            except NotTraced as reason:
                name = f"{info.namespace}::{info.func._schema.name.split('::')[1]}"
                self.assume(f"{name} is taken to be a function of its operands alone; it is not looked into: {reason}")
        return self.record(Invocation(info, args, kwargs, self.aliases))

    def record(self, call: Invocation) -> Any:
        info = call.info
        if info.dynamic and _shape_depends_on_data(call):
            result = self._known_shape(call)
        elif info.name == GROUPED and call.args[0].dtype != torch.bfloat16 and is_defined(*call.args, **call.kwargs):
            ends = ends_of(call.args, call.kwargs)  # without them nothing is known of the product, and torch would refuse it
            self.constant_tensor(ends)
            result = torch.empty(shape_of(call.args[0], call.args[1], ends.shape[0]), dtype=call.args[0].dtype, device=META)
        else:
            result = self._execute(call)
        if info.is_view:
            self.aliases.bind_views(info.name, call.cells[0], tensors_in(result), call.encoded[1:])
            return result
        if self.races.active:
            self.races.read(call.cells, self.here())
        if info.has_dtype and "dtype" not in call.keywords and isinstance(result, torch.Tensor) and not call.cells:
            call.keywords["dtype"] = Symbol("dtype", DTYPE_NAMES[result.dtype])
        if info.written:
            return self._record_writes(call, result)
        outputs = tensors_in(result)
        for tensor, value in zip(outputs, self._values(call, outputs), strict=True):
            self._bind_fresh(call, tensor, value)
        return result

    def _values(self, call: Invocation, outputs: list[torch.Tensor], writes: tuple[str, ...] = ()) -> tuple[Value, ...]:
        """What the outputs hold: new values, of a new node, except for random numbers that were drawn before."""
        if call.info.random:
            require_declared(self.bodies)
            generator = call.generator or torch.default_generator
            drawn = self.random_state.draw(generator, call.info, call.encoded, call.keywords, outputs)
            if self.random_state.shared:
                self.assume("random numbers of different calls are unrelated, even where a generator was in one state for both")
            if drawn is not None:
                return drawn
        values = tuple([self.new_value(t.shape, t.dtype) for t in outputs])
        self.emit(call.info.name, call.encoded, call.keywords, values, writes)
        if call.info.random:
            self.random_state.remember(values)
            self.graph.states[values[-1]] = self.random_state.state
        return values

    def _bind_fresh(self, call: Invocation, tensor: torch.Tensor, value: Value) -> None:
        if self.aliases.storage_of(tensor) is not None:
            raise CaptureError(f"{call.info.name} returns memory of an argument, which its schema does not say; return a copy")
        storage = self.aliases.bind(tensor, value).storage
        if call.device is not None or self._names_devices:
            self._names_devices = True
            storage.device = call.device or next((c.storage.device for c in call.cells if c.storage.device is not None), None)

    def _record_writes(self, call: Invocation, result: Any) -> Any:
        info = call.info
        written: list[torch.Tensor] = []
        names: list[str] = []
        for position, name, keyword_only in info.written:
            held = call.argument(position, name, keyword_only)
            targets = tensors_in(held)
            written += targets
            names += [name] if isinstance(held, torch.Tensor) else [f"{name}.{i}" for i in range(len(targets))]
        fresh = [t for t in tensors_in(result) if all(t is not w for w in written)]
        cells = [self._target(info, tensor, call.cells) for tensor in written]
        require_separate(info, call.cells, cells)
        values = self._values(call, written + fresh, tuple(names))
        if self.races.active:
            self.races.write(cells, self.here())
        for cell, value in zip(cells, values, strict=False):
            self.aliases.write(cell, value)
        for tensor, value in zip(fresh, values[len(written) :], strict=True):
            self._bind_fresh(call, tensor, value)
        return call.returned(result)

    def _target(self, info: Operator, tensor: torch.Tensor, arguments: list[Cell]) -> Cell:
        """The window that an operator has written. `out=` tensors of another size are resized by torch: fine for an empty
        one, which has nothing to lose."""
        storage = self.aliases.storage_of(tensor)
        cell = None if storage is None else storage.cells.get(self.aliases.geometry_of(tensor))
        if cell is not None and cell in arguments:
            return cell
        before = [argument for argument in arguments if argument.storage is storage]
        if storage is None or storage.twin is not None or not all(0 in argument.shape for argument in before):
            raise CaptureError(f"{info.name} resizes the tensor that it writes to; give it one of the right shape")
        return self.aliases.bind(tensor, self.new_value(tensor.shape, tensor.dtype))

    def _execute(self, call: Invocation) -> Any:
        """Run the operator on meta tensors, or remember what it gave for inputs of the same form."""
        if not (self.use_cache and call.info.cacheable):
            return self._run(call)
        key = call.key()
        remembered = SHAPES.get(key)
        if remembered is not None:
            return SHAPES.revive(remembered, call.first)
        result = self._run(call)
        if not any(self.aliases.storage_of(t) for t in tensors_in(result) if t is not call.first):
            SHAPES.put(key, result, call.first, len(call.info.written))
        return result

    @staticmethod
    def _run(call: Invocation) -> Any:
        info = call.info
        try:
            return info.func(*call.args, **call.kwargs)
        except NotImplementedError as error:
            if "meta" not in str(error).lower():
                raise
            if info.namespace == "aten" and info.written and not info.func._schema.returns:
                return None  # it only writes, and tensors as they are
            advice = "use another operator" if info.namespace == "aten" else "register one with torch.library.register_fake"
            raise CaptureError(
                f"the operator {info.name} has no meta kernel, so its output shape is not known without running it; {advice}"
            ) from None

    def _alias(self, info: Operator, args: tuple[Any, ...]) -> torch.Tensor:
        """The same window again: no node."""
        tensor = args[0]
        cell = self.aliases.cell(tensor)
        source = tensor if is_meta(tensor) else self.aliases.without_data(cell)
        return info.func(source)

    def _rename_dims(self, info: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """`squeeze_` and the like move a tensor to another window of its memory: they are views that keep the object. They
        touch no data, so that a tensor with data may be renamed as it is."""
        if info.name == "aten.set_.source_Tensor" and is_meta(args[0]) and is_meta(args[1]):
            self.aliases.cell(args[1])
            return info.func(*args)  # the tensor shows that window of that memory from now on
        if info.name == "aten.resize_.default" and not kwargs and is_meta(args[0]) and self._has_room(*args):
            return info.func(*args)  # as many elements of its memory, one after another
        view = info.name.replace("_.", ".", 1)
        view = "aten.transpose.int" if view == "aten.transpose.default" else view
        if view not in _RENAMES:
            raise CaptureError(f"{info.name} changes a tensor's shape in place, which is not modelled; use the form "
                               "that returns a new tensor")  # fmt: skip
        base = self.aliases.cell(args[0])
        renamed: torch.Tensor = info.func(*args)
        self.aliases.bind_views(view, base, [renamed], args[1:])
        return renamed

    def _has_room(self, tensor: torch.Tensor, size: Sequence[int]) -> bool:
        """Whether the memory that a tensor has been seen in is enough for it at another size."""
        root = self.aliases.cell(tensor).storage.root
        return root.geometry[0] == 0 and tensor.storage_offset() + math.prod(size) <= math.prod(root.shape)

    # ------------------------------------------------------------------ reading values
    def constant_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The data of a tensor that follows from constants alone; an error, which the program cannot hide, if it does not."""
        with _disable_current_modes():
            value = self.value(tensor)
        return self.read(value)

    def read(self, value: Value) -> torch.Tensor:
        """What the program is told when it asks for a value."""
        self.locate()
        try:
            with _disable_current_modes():
                return self.constants.read(value)
        except NotConstant as reason:
            error = _kind(reason)(
                f"the program reads the value of a tensor that depends on {reason.culprit}; what it does next would hold "
                "for that value only, so keep values in tensors (torch.where, masks) or pass it as a Python number"
            )
        raise self.failed(error)

    def failed(self, error: CaptureError) -> CaptureError:
        if self.failure is None:
            source = self.here()
            self.failure = error.located(str(source)) if source else error
        return error

    def _read_scalar(self, info: Operator, args: tuple[Any, ...]) -> Any:
        return info.func(*[self.constant_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args])

    def _known_shape(self, call: Invocation) -> Any:
        """An operator whose output shape depends on data: fine where the data are constants."""
        node = Node(call.info.name, call.encoded, call.keywords, ())
        selected = {call.encoded[0]} if node.op in _SELECTIONS else set()
        try:
            known = {value: self.constants.read(value) for value in node.operands() if value not in selected}
        except NotConstant as reason:
            raise _kind(reason)(
                f"the shape of {node.op}'s result depends on {reason.culprit}; shapes must not depend on values: use a mask "
                "(torch.where) instead of selecting elements"
            ) from None
        for value in selected:
            assert isinstance(value, Value)
            known[value] = torch.zeros((), dtype=DTYPES[value.dtype]).expand(value.shape)
        results = self.constants.kernels.run(node, known.__getitem__)
        fresh = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META) for t in results]
        return fresh[0] if len(fresh) == 1 else tuple(fresh)

    # ------------------------------------------------------------------ entering
    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Record again, from inside a handler."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def __enter__(self) -> Recorder:
        self._collects = gc.isenabled()
        gc.disable()  # a capture makes many small objects that all live: collecting them in vain is a third of the time
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exception: object) -> None:
        if self._collects:
            gc.enable()
        super().__exit__(*exception)
        self.graph.assumptions = tuple(sorted({*self.graph.assumptions, *self.assumptions}))


def _kind(reason: NotConstant) -> type[CaptureError]:
    """Of the error: what a sample of the inputs would answer is an error of its own."""
    return ReadsValuesError if reason.of_inputs else CaptureError


def _shape_depends_on_data(call: Invocation) -> bool:
    """Some operators are marked as such for one of their uses only."""
    if call.info.name == "aten.index.Tensor":
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in call.args[1])
    if call.info.name == "aten.repeat_interleave.Tensor":
        return call.kwargs.get("output_size") is None
    return True


def _without_dynamo_guard() -> None:
    """TorchDispatchMode wraps the method so that dynamo skips it, at 10 µs a call; nothing here is compiled."""
    method = Recorder.__dict__["__torch_dispatch__"]
    while hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    Recorder.__torch_dispatch__ = method  # type: ignore[method-assign]


_without_dynamo_guard()

"""`gg.jax`: what users of JAX call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphguard.capture.front import Captured
from graphguard.capture.hlo.front import texts
from graphguard.capture.jax.front import functions
from graphguard.capture.jax.kernels import KernelLemma
from graphguard.errors import UsageError
from graphguard.pipeline import Job, run
from graphguard.report.report import Report
from graphguard.scope import counted

__all__ = ["capture", "lemma", "verify", "verify_hlo"]
Range = tuple[float | None, float | None]


@counted
def verify(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    *,
    mesh: Mapping[str, int],
    args: Sequence[Any],
    ranges: Mapping[str, Range] | None = None,
    lemmas: Sequence[Any] = (),
    trials: int | None = None,
    seed: int = 0,
    limits: Mapping[str, int] | None = None,
) -> Report:
    """Whether the distributed function computes what the sequential one does, for all inputs.

    sequential, distributed: functions of the same global arrays, which return pytrees of arrays. The distributed one has a
        `jax.shard_map` over `jax.sharding.AbstractMesh(sizes, names)`, or over a mesh of devices; `in_specs` and `out_specs`
        say what each device has. Either may take gradients, inside of the shard_map or around it.
    mesh: `{axis: size}`, the axes of that mesh. No devices are needed.
    args: one entry for each argument: pytrees of `jax.ShapeDtypeStruct`, or of arrays, of which only shapes are used.
    ranges: `{name: (low, high)}`, low <= v < high, for arrays of whole numbers that index: names are those of the sequential
        function's parameters, `labels` or `batch.labels`.
    lemmas: what kernels by Pallas compute, each made by `gg.jax.lemma`.

    All other arguments are those of `gg.verify`.
    """
    kernels = [each for each in lemmas if isinstance(each, KernelLemma)]
    others = [each for each in lemmas if not isinstance(each, KernelLemma)]
    return run(Job(functions(sequential, distributed, mesh, args, ranges, kernels), others, trials, seed, limits))


def lemma(kernel: str, definition: Callable[..., Any]) -> KernelLemma:
    """What a kernel by Pallas computes, for `lemmas=` of `verify`.

    kernel: the name of its `pallas_call`: what `name=` says, or the name of the kernel's function.
    definition: a function in plain JAX of the operands of the call, which gives what the call gives. It is compared with the
        kernel, which an interpreter runs on random numbers of the shapes of each call; where that cannot be, it is trusted,
        and the report says so.
    """
    if not isinstance(kernel, str) or not callable(definition):
        raise UsageError("write gg.jax.lemma(name, function): the name of a pallas_call, and a function in plain JAX")
    return KernelLemma(kernel, definition)


def capture(
    sequential: Callable[..., Any],
    distributed: Callable[..., Any],
    *,
    mesh: Mapping[str, int],
    args: Sequence[Any],
    ranges: Mapping[str, Range] | None = None,
) -> Captured:
    """The graphs of two functions: the sequential one, every rank's, and the input relation."""
    return functions(sequential, distributed, mesh, args, ranges).capture()


@counted
def verify_hlo(
    before: str,
    after: str,
    *,
    mesh: Mapping[str, int] | None = None,
    ranges: Mapping[str, Range] | None = None,
    trials: int | None = None,
    seed: int = 0,
    limits: Mapping[str, int] | None = None,
) -> Report:
    """Whether what XLA's partitioner wrote computes what it was given, for all inputs: for `jax.jit` with shardings.

    before, after: the files that `XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=spmd.*"` leaves,
        `*.before_spmd-partitioning.txt` and `*.after_spmd-partitioning.*.txt`. Shardings of arguments and results are read
        from the first one.
    mesh: `{axis: size}`, for the words of the report; the devices in a row, if it is left out.
    ranges: `{name: (low, high)}`, low <= v < high, for arguments that index; their names are those that the first file has.
    """
    contents = [_text_of(file) for file in (before, after)]
    return run(Job(texts(contents[0], contents[1], mesh, ranges, (before, after)), (), trials, seed, limits))


def _text_of(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from None

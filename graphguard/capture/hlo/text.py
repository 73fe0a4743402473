"""HLO text, as XLA dumps it: computations of instructions, and the tables that say where they come from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from graphguard.errors import CaptureError, GraphFormatError
from graphguard.graph.ir import Source

DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "s64": "int64", "s32": "int32",
          "s16": "int16", "s8": "int8", "u8": "uint8", "u32": "uint32", "pred": "bool"}  # fmt: skip
MOST_FRAMES = 5
Type = tuple[str, tuple[int, ...]]  # the dtype in JAX, and the shape

_NAMED = re.compile(r'(\d+) "(.*)"')
_LOCATION = re.compile(r"(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
_FRAME = re.compile(r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_SECTIONS = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class _Unreadable(ValueError):
    """With words for the user."""


@dataclass(frozen=True)
class Instruction:
    """One line. raw: what stands between the parentheses; attributes: what stands behind them."""

    name: str
    op: str
    types: tuple[Type, ...]
    operands: tuple[str, ...]
    raw: str
    attributes: str
    is_root: bool

    @property
    def type(self) -> Type:
        if len(self.types) != 1:
            raise CaptureError(f"{self.op} gives {len(self.types)} arrays")
        return self.types[0]

    def numbers(self, key: str) -> tuple[int, ...]:
        """Of `key={1,2}`; none if it is not there."""
        found = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(each) for each in found[1].split(",") if each) if found else ()

    def number(self, key: str) -> int:
        found = re.search(rf"\b{key}=(\d+)", self.attributes)
        if found is None:
            raise CaptureError(f"{self.op} has no {key}")
        return int(found[1])

    def word(self, key: str) -> str:
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        if found is None:
            raise CaptureError(f"{self.op} has no {key}")
        return found[1]

    def has(self, key: str) -> bool:
        return re.search(rf"\b{key}=", self.attributes) is not None

    @property
    def sharding(self) -> str | None:
        start = self.attributes.find("sharding={")
        return braced(self.attributes, start + len("sharding=")) if start >= 0 else None

    @property
    def label(self) -> str:
        """What the program calls it: the name of an argument."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else self.name


@dataclass
class Module:
    """partitions: how many devices it is for. Computations are in the order of the text: each calls only earlier ones."""

    partitions: int
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""
    names: dict[str, dict[int, str]] = field(default_factory=lambda: {section: {} for section in _SECTIONS[:2]})
    locations: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def main(self) -> list[Instruction]:
        return self.computations[self.entry]

    @property
    def parameters(self) -> list[Instruction]:
        return sorted((each for each in self.main if each.op == "parameter"), key=lambda each: int(each.raw))

    @property
    def root(self) -> Instruction:
        return next(each for each in self.main if each.is_root)

    def source(self, instruction: Instruction) -> Source | None:
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self._source(int(found[1]), MOST_FRAMES) if found else None

    def _source(self, frame: int, depth: int) -> Source | None:
        if frame not in self.frames or depth == 0:
            return None
        place, parent = self.frames[frame]
        file, function, line = self.locations[place]
        caller = self._source(parent, depth - 1) if parent != frame else None
        return Source(self.names["FileNames"][file], line, self.names["FunctionNames"][function], caller)


def braced(text: str, start: int) -> str:
    """From an opening brace or parenthesis to its end."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return text[start : place + 1]
    raise _Unreadable("a brace is not closed")


def parse(text: str, file: str) -> Module:
    """The module of a text; what cannot be read is one sentence that names the line."""
    head = re.match(r"HloModule [^\n]*", text)
    if head is None:
        raise GraphFormatError(f"{file}: it does not begin with HloModule; dump it with --xla_dump_hlo_as_text")
    partitions = re.search(r"num_partitions=(\d+)", head[0])
    replicas = re.search(r"replica_count=(\d+)", head[0])
    if replicas is not None and int(replicas[1]) != 1:
        raise GraphFormatError(f"{file}: it is for {replicas[1]} replicas; only partitions are read")
    module, section = Module(int(partitions[1]) if partitions else 1), ""
    for number, line in enumerate(re.sub(r"/\*.*?\*/", "", text).splitlines(), 1):
        try:
            section = _read(module, line, section)
        except _Unreadable as error:
            raise GraphFormatError(f"{file}: line {number} cannot be read as HLO: {error}") from None
        except (ValueError, KeyError, IndexError, AttributeError):
            raise GraphFormatError(f"{file}: line {number} cannot be read as HLO: it is no instruction, or cut off") from None
    if not module.entry or not any(each.is_root for each in module.main):
        raise GraphFormatError(f"{file}: it has no ENTRY computation with a ROOT; is it cut off?")
    return module


def _read(module: Module, line: str, section: str) -> str:
    """One line. Gives the section that the next one is in."""
    if line.strip() in _SECTIONS:
        return line.strip()
    if section in module.names and (found := _NAMED.fullmatch(line)):
        module.names[section][int(found[1])] = found[2]
    elif found := _LOCATION.match(line):
        module.locations[int(found[1])] = (int(found[2]), int(found[3]), int(found[4]))
    elif found := _FRAME.match(line):
        module.frames[int(found[1])] = (int(found[2]), int(found[3] or found[1]))
    elif found := _HEAD.fullmatch(line):
        if found[2] in module.computations:
            raise _Unreadable(f"the computation {found[2]} is there twice")
        module.computations[found[2]] = []
        module.entry = found[2] if found[1] else module.entry
        return found[2]
    elif found := _INSTRUCTION.fullmatch(line):
        module.computations[section].append(_instruction(found[2], found[3], bool(found[1])))
    elif line.strip() not in ("", "}") and not line.startswith("HloModule"):
        raise _Unreadable(f"what is {line.strip()[:40]!r}?")
    return section


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    end = len(braced(rest, 0)) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end + 1 :]
    op = rest[: rest.index("(")]
    inner = braced(rest, len(op))
    operands = tuple(re.findall(r"%([\w.\-]+)", inner)) if op not in ("constant", "parameter") else ()
    return Instruction(name, op, _types(kind), operands, inner[1:-1], rest[len(op) + len(inner) :], is_root)


def _types(text: str) -> tuple[Type, ...]:
    found = []
    for dtype, sizes in re.findall(r"\b(\w+)\[([\d,]*)\]", text):
        if dtype not in DTYPES:
            raise _Unreadable(f"arrays of {dtype} have no exact graph yet")
        found.append((DTYPES[dtype], tuple(int(size) for size in sizes.split(",") if size)))
    return tuple(found)

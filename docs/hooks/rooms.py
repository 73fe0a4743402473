"""The map of the package: its rooms (folders, and files at the top), what each holds, and who uses whom, from the imports.

`python docs/hooks/written.py` writes it to docs/inside/rooms.md and rooms.svg.
"""

from __future__ import annotations

import ast
import textwrap
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "graphguard"
EVERYWHERE = ("errors",)  # used by all: not drawn
WIDTH, HEIGHT, GAP, BETWEEN = 200, 92, 14, 44  # of boxes, and of the space around them
LETTERS, LINES, IN_A_ROW = 27, 4, 5  # of the text in a box, and of boxes


def page():
    """docs/inside/rooms.md."""
    lines = [
        "# The rooms",
        "",
        "Each folder of `graphguard/` is a room with one task, and so is each file at its top. An arrow leads from a room to\n"
        "one that it imports from. What follows from other arrows is not drawn, nor is `errors`, which all use.",
        "",
        "[![The rooms, and who imports from whom](rooms.svg)](rooms.svg)",
        "",
        *cycles(),
        "| room | what it holds | it imports from |",
        "|---|---|---|",
        *(row(name) for layer in layers() for name in layer),
        "",
        "Some have rooms of their own:",
        "",
        "| room | what it holds |",
        "|---|---|",
        *(f"| `{path}` | {title(PACKAGE / path)} |" for path in inner()),
        "",
        "`python docs/hooks/written.py` writes this page from the imports and the docstrings, and a test compares it.",
    ]
    return "\n".join(lines) + "\n"


def cycles():
    """A sentence on the rooms that import from each other, if there are any."""
    found = sorted({members for room in imports() if len(members := cycle_of(room)) > 1}, key=sorted)
    said = "; ".join(", ".join(f"`{room}`" for room in sorted(members)) for members in found)
    return [f"These import from each other, directly or not, and share a row: {said}.", ""] if found else []


def row(name):
    used = ", ".join(f"`{other}`" for other in sorted(imports()[name])) or "nothing"
    return f"| `{name}` | {title(PACKAGE / name)} | {used} |"


def title(place):
    """What a room or a file holds: the first paragraph of its docstring."""
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    first = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|")


def inner():
    """Folders inside of rooms."""
    folders = (file.parent.relative_to(PACKAGE) for file in PACKAGE.rglob("__init__.py"))
    return sorted(folder.as_posix() for folder in folders if len(folder.parts) > 1)


# ---------------------------------------------------------------------- imports
@cache
def imports():
    """By room, the other rooms that its files import from: at the top, inside of functions, or for types."""
    found = {room_of(file): set() for file in files()}
    for file in files():
        for node in ast.walk(ast.parse(file.read_text())):
            found[room_of(file)] |= set(imported(node)) & found.keys()
    return {room: frozenset(others - {room}) for room, others in found.items()}


def files():
    return sorted(file for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE or not file.stem.startswith("__"))


def room_of(file):
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(node):
    """The rooms that an import statement names."""
    if isinstance(node, ast.ImportFrom) and node.module == "graphguard":
        return [alias.name for alias in node.names]
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
    return [name.split(".")[1] for name in names if name.startswith("graphguard.")]


@cache
def reach(room):
    """All that a room uses, directly or not."""
    found, left = set(), [room]
    while left:
        new = imports()[left.pop()] - found
        found |= new
        left += new
    return found


def cycle_of(room):
    """The room, and those that it uses and that use it."""
    return frozenset({room} | {other for other in reach(room) if room in reach(other)})


@cache
def depth(cycle):
    users = {cycle_of(other) for other in imports() if reach(other) & cycle} - {cycle}
    return 1 + max(map(depth, users), default=-1)


@cache
def layers():
    """The rooms from top to bottom, each below all that use it; those of a cycle share a layer."""
    found = {}
    for room in sorted(imports()):
        found.setdefault(depth(cycle_of(room)), []).append(room)
    return [found[number] for number in sorted(found)]


def arrows():
    """Pairs of rooms, without what follows from others."""
    for room in sorted(set(imports()) - set(EVERYWHERE)):
        others = imports()[room] - cycle_of(room) - set(EVERYWHERE)
        follows = {far for other in others for far in reach(other) - cycle_of(other)}
        yield from ((room, other) for other in sorted(others - follows))


# ---------------------------------------------------------------------- the picture
def picture():
    """docs/inside/rooms.svg."""
    rows, paths = routed()
    widths = [sum(map(width, members)) + GAP for members in rows]
    total, height = max(widths), len(rows) * (HEIGHT + BETWEEN) - BETWEEN + 2 * GAP
    at = {}
    for number, members in enumerate(rows):
        x = (total - widths[number]) / 2 + GAP
        for member in members:
            at[member] = x, GAP + number * (HEIGHT + BETWEEN)
            x += width(member)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{total}" height="{height}" rx="8" fill="#fafafa"/>',
        '<marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#7986cb"/></marker>',
        *(arrow([at[step] for step in path], [width(step) for step in path]) for path in paths),
        *(box(room, *at[room]) for room in sorted(imports()) if room in at),
        "</svg>",
        "",
    ])  # fmt: skip


def routed():
    """Rows of rooms and of places between them, and for each arrow its places, row by row."""
    drawn = ([room for room in layer if room not in EVERYWHERE] for layer in layers())
    rows = [layer[start : start + IN_A_ROW] for layer in drawn for start in range(0, len(layer), IN_A_ROW)]
    number = {room: place for place, members in enumerate(rows) for room in members}
    paths = []
    for one, other in arrows():
        between = [(one, other, place) for place in range(number[one] + 1, number[other])]
        for step in between:
            rows[step[2]].append(step)
        paths.append([one, *between, other])
    place = {}
    for members in rows:  # in an order in which arrows cross less: by where those are that lead here
        sources = {
            member: [place[path[k - 1]] for path in paths for k in range(1, len(path)) if path[k] == member]
            for member in members
        }
        members.sort(key=lambda member: (sum(sources[member]) / max(1, len(sources[member])) or 0.5, str(member)))
        place |= {member: (index + 0.5) / len(members) for index, member in enumerate(members)}
    return rows, paths


def width(member):
    return WIDTH + GAP if isinstance(member, str) else GAP


def arrow(places, widths):
    """A curve from below the first place to above the last one, straight through those between."""
    points = []
    for number, ((x, y), wide) in enumerate(zip(places, widths, strict=True)):
        middle = x + (wide - GAP) / 2
        points += [(middle, y)] * (number > 0) + [(middle, y + HEIGHT)] * (number + 1 < len(places))
    curve = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (x, y), (to_x, to_y) in pairwise(points):
        curve += f"C{x:.0f} {(y + to_y) / 2:.0f} {to_x:.0f} {(y + to_y) / 2:.0f} {to_x:.0f} {to_y:.0f}"
    return f'<path d="{curve}" fill="none" stroke="#7986cb" marker-end="url(#end)"/>'


def box(room, x, y):
    texts = textwrap.wrap(title(PACKAGE / room).replace("`", ""), LETTERS, max_lines=LINES, placeholder=" …")
    lines = "".join(f'<tspan x="{x + 8:.0f}" dy="15">{escape(text)}</tspan>' for text in texts)
    return (
        f'<g><rect x="{x:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#fff" stroke="#3f51b5"/>'
        f'<text x="{x + 8:.0f}" y="{y + 20}"><tspan font-size="15" font-weight="bold">{room}</tspan>{lines}</text></g>'
    )

"""Who holds which part of a tensor, drawn in text: a box per tile, in it the ranks that have it.

`=` joins ranks with equal copies, `+` ranks whose values are summands; of a mean, a maximum and a minimum it is said.
"""

from __future__ import annotations

from graphguard.graph.placement import Span, Spans
from graphguard.graph.tensor_layout import TensorLayout

MOST_COLUMNS, MOST_ROWS, MOST_RANKS = 4, 4, 4
_REDUCED = {"avg": "mean", "max": "maximum", "min": "minimum"}
_BOXES = {
    True: ("┌┬┐", "├┼┤", "└┴┘", "─", "│"),
    False: ("+++", "+++", "+++", "-", "|"),
}


def picture(holding: TensorLayout, unicode: bool = True) -> list[str]:
    """Rows are tiles along the first dim that is cut, columns along the second; other cut dims are named in the boxes."""
    grid = Grid(holding, unicode)
    return grid.lines()


def members(summands: list[list[int]], factor: str | None = None, more: str = "…", reduce: str = "sum") -> str:
    """`rank 0 = rank 2`, `rank 0 + rank 1`, `(0 = 2) + (1 = 3)`, `mean of rank 0, rank 1`, `rank 0 = rank 1 = 1/2 × it`."""
    by, lead = (" + ", "") if reduce == "sum" else (", ", f"{_REDUCED[reduce]} of ")
    if len(summands) == 1:
        text = _joined([f"rank {rank}" for rank in summands[0]], " = ", more)
    elif all(len(copies) == 1 for copies in summands):
        text = lead + _joined([f"rank {copies[0]}" for copies in summands], by, more)
    else:
        text = lead + _joined([f"({_joined(list(map(str, copies)), ' = ', more)})" for copies in summands], by, more)
    return text if factor is None else f"{text} = {factor} × it"


def _joined(names: list[str], by: str, more: str) -> str:
    if len(names) <= MOST_RANKS:
        return by.join(names)
    return by.join([*names[: MOST_RANKS - 2], more, names[-1]])


def dims_of(tiles: list[Spans]) -> list[int]:
    """The dims along which tiles differ."""
    return [dim for dim in range(len(tiles[0]) if tiles else 0) if len({tile[dim] for tile in tiles}) > 1]


class Grid:
    def __init__(self, holding: TensorLayout, unicode: bool):
        self.tiles = holding.tiles()
        self.factor, self.reduce, self.unicode = holding.factor, holding.reduce, unicode
        self.more = "…" if unicode else "..."
        cut = dims_of(list(self.tiles))
        self.column_dim = cut[-1] if cut else None
        self.row_dim = cut[-2] if len(cut) > 1 else None
        self.rows = self._spans(self.row_dim, MOST_ROWS)
        self.columns = self._spans(self.column_dim, MOST_COLUMNS)

    def _spans(self, dim: int | None, most: int) -> list[Span | str | None]:
        """The spans of a dim, with a gap where there are too many; one None for a dim that is not cut."""
        if dim is None:
            return [None]
        spans: list[Span | str | None] = list(dict.fromkeys(tile[dim] for tile in self.tiles))
        return spans if len(spans) <= most else [*spans[: most - 2], self.more, spans[-1]]

    def lines(self) -> list[str]:
        cells = [[self._cell(row, column) for column in self.columns] for row in self.rows]
        heads = [_span(column) for column in self.columns]
        widths = [max(len(heads[n]), *(len(line[n]) for line in cells)) for n in range(len(heads))]
        sides = [_span(row) for row in self.rows]
        margin = max(len(side) for side in sides)
        top, middle, bottom, flat, bar = _BOXES[self.unicode]
        pad = " " * margin + (" " if margin else "")

        def rule(ends: str) -> str:
            return pad + ends[0] + ends[1].join(flat * (width + 2) for width in widths) + ends[2]

        lines = [rule(top)]
        for number, (side, row) in enumerate(zip(sides, cells, strict=True)):
            boxes = bar.join(f" {cell.ljust(width)} " for cell, width in zip(row, widths, strict=True))
            lines += ([rule(middle)] if number else []) + [f"{side.rjust(margin)}{' ' if margin else ''}{bar}{boxes}{bar}"]
        lines.append(rule(bottom))
        if self.column_dim is not None:
            lines.insert(0, (pad + " " + " ".join(f" {h.ljust(w)} " for h, w in zip(heads, widths, strict=True))).rstrip())
            lines[0] += f"  of dim {self.column_dim}"
        if self.row_dim is not None:
            lines[0] += f", rows of dim {self.row_dim}"
        return lines

    def _cell(self, row: Span | str | None, column: Span | str | None) -> str:
        if isinstance(row, str) or isinstance(column, str):
            return self.more
        here = [
            members(summands, self.factor, self.more, self.reduce)
            for tile, summands in self.tiles.items()
            if (row is None or tile[self._dim(self.row_dim)] == row)
            and (column is None or tile[self._dim(self.column_dim)] == column)
        ]
        return "; ".join(here[:2]) + (f"; {self.more}" if len(here) > 2 else "")

    @staticmethod
    def _dim(dim: int | None) -> int:
        assert dim is not None
        return dim


def _span(span: Span | str | None) -> str:
    return "" if span is None else span if isinstance(span, str) else f"{span[0]}:{span[1]}"

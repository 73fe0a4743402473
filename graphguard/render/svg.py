"""Who holds which part of a tensor, as SVG: a rectangle per tile with the ranks that have it."""

from __future__ import annotations

from html import escape

from graphguard.graph.placement import Span, Spans
from graphguard.graph.tensor_layout import TensorLayout
from graphguard.render.picture import dims_of, members

WIDTH, ROW, MARGIN, TOP = 420, 44, 58, 22  # the last two, where spans are written
MOST = 8  # tiles along a dim that are drawn
_HUES = (210, 30, 130, 280, 0, 175, 55, 320)


def svg(holding: TensorLayout) -> str:
    """Rows are tiles along the last dim but one that is cut, columns along the last. Summands are hatched."""
    tiles = holding.tiles()
    cut = dims_of(list(tiles))
    rows = _spans(tiles, cut[-2] if len(cut) > 1 else None)
    columns = _spans(tiles, cut[-1] if cut else None)
    high, wide = min(len(rows), MOST), min(len(columns), MOST)
    margin, top = MARGIN if len(cut) > 1 else 2, TOP if cut else 2
    height = top + ROW * high + 8
    parts = [_hatching()]
    step = (WIDTH - margin - 8) / wide
    for number, column in enumerate(columns[:wide]):
        if column is not None:
            parts.append(_text(margin + (number + 0.5) * step, top - 8, _label(column), "span"))
    for place, row in enumerate(rows[:high]):
        if row is not None:
            parts.append(_text(margin - 6, top + (place + 0.5) * ROW + 4, _label(row), "span end"))
        for number, column in enumerate(columns[:wide]):
            here = [
                summands
                for tile, summands in tiles.items()
                if (row is None or tile[cut[-2]] == row) and (column is None or tile[cut[-1]] == column)
            ]
            if here:
                box = (margin + number * step, top + place * ROW, step, ROW)
                parts.append(_tile(box, here, holding, alone=len(tiles) == 1))
    more = [f"{len(rows) - high} more rows"] * (len(rows) > high) + [f"{len(columns) - wide} more columns"] * (
        len(columns) > wide
    )
    if more:
        parts.append(_text(WIDTH - 8, height + 10, f"and {', '.join(more)}", "span end"))
        height += 16
    label = escape(
        f"{holding.name} {'is expected as' if holding.role == 'expected' else 'is'} {holding.type} on {holding.mesh}"
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _spans(tiles: dict[Spans, list[list[int]]], dim: int | None) -> list[Span | None]:
    return [None] if dim is None else list(dict.fromkeys(tile[dim] for tile in tiles))


def _tile(box: tuple[float, float, float, float], here: list[list[list[int]]], holding: TensorLayout, alone: bool) -> str:
    x, y, width, height = box
    summands = here[0]
    hue = "" if alone else f' style="--h:{_HUES[summands[0][0] % len(_HUES)]}"'
    text = members(summands, holding.factor, reduce=holding.reduce) if len(here) == 1 else f"{len(here)} tiles"
    fits = 6.6 * len(text) <= width - 6
    shown = text if fits else "+".join(str(copies[0]) for copies in summands) if len(summands) > 1 else str(summands[0][0])
    if 6.6 * len(shown) > width - 6:
        shown = "…"
    hatch = _rectangle(x, y, width, height, "hatch", "") if len(summands) > 1 else ""
    title = f"<title>{escape(text)}</title>"
    return (
        f"<g>{title}{_rectangle(x, y, width, height, 'tile' if not alone else 'tile whole', hue)}{hatch}"
        f"{_text(x + width / 2, y + height / 2 + 4, shown, 'who')}</g>"
    )


def _rectangle(x: float, y: float, width: float, height: float, kind: str, style: str) -> str:
    place = f'x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{height - 2:.1f}"'
    return f'<rect {place} rx="3" class="{kind}"{style}/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _label(span: Span) -> str:
    return f"{span[0]}:{span[1]}"


def _hatching() -> str:
    return (
        '<defs><pattern id="gg-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line x1="0" y1="0" x2="0" y2="6" class="hatching"/></pattern></defs>'
    )

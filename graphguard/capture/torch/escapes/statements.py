"""Which statement, and which call, a frame is in."""

from __future__ import annotations

import ast
import functools
import linecache
from itertools import islice
from types import FrameType

Range = tuple[tuple[int, int], tuple[int, int]]


def statement_of(frame: FrameType) -> ast.stmt | None:
    """The innermost statement that the frame is in."""
    at = _position(frame)
    if at is None:
        return None
    around = [node for node in _parsed(frame.f_code.co_filename) if _begin(node) <= at[0] and at[1] <= _end(node)]
    return max(around, key=_begin, default=None)


def call_of(frame: FrameType) -> ast.Call | None:
    """The call that the frame waits for."""
    statement, at = statement_of(frame), _position(frame)
    if statement is None:
        return None
    calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
    return next((call for call in calls if (_begin(call), _end(call)) == at), None)


def _position(frame: FrameType) -> Range | None:
    line, end_line, column, end_column = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return (line, column), (end_line, end_column)


def _begin(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


@functools.cache
def _parsed(file: str) -> tuple[ast.stmt, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.stmt))

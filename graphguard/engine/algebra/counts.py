"""A count of what a step leaves, and a number beside it: one count.

    4 + relu(3 - i)  is  relu(7 - i)        where i is at most 3

A sum over a block that a mask leaves whole is a number as soon as it is made. So the blocks that come to a rank, of which a
mask cuts one and leaves others whole, make up the count that a program has which masks the whole row.
"""

from __future__ import annotations

import numpy as np

from graphguard.engine.algebra.alike import same_term
from graphguard.engine.store.step_counts import is_count, with_more
from graphguard.engine.store.table import Table
from graphguard.engine.terms.lane import collapse, equal
from graphguard.engine.terms.term import Term


def with_number(table: Table, counting: Term, plain: Term) -> Term | None:
    """A term that counts, with what a number beside it adds to the count; None if it is no such number."""
    if not equal(counting.weight, 1):
        return None
    for place, factor in enumerate(counting.factors):
        if not is_count(table, factor):
            continue
        one = table.settle(counting.with_(factors=counting.factors[:place] + counting.factors[place + 1 :]))
        if one is None or not equal(one.weight, 1):
            continue
        ratio = plain.coefficient / one.coefficient
        if ratio.denominator == 1 and same_term(plain.with_(coefficient=one.coefficient, weight=1), one):
            found = with_more(table, counting, place, collapse(np.asarray(plain.weight) * int(ratio)))
            if found is not None:
                return found
    return None

"""`ragged_all_to_all` where offsets and sizes are known: pieces of other sizes on each rank, out, back, and refused where they
do not fit. XLA does not run it on CPUs: the graphs are compared with what JAX's documentation says of it, in numpy."""

import jax
import jax.numpy as jnp
import jax_cases.case  # noqa: F401 # before jax looks for devices: the host has eight
import numpy as np
import pytest
import torch
from jax import lax, shard_map
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from graphguard import jax as gg_jax
from graphguard.errors import CaptureError
from graphguard.oracle.replay import replay_joint

N, ROWS = 4, 6
# By sender and receiver: how many rows go, and so where they begin, and where they go to.
SIZES = np.array([[1, 2, 0, 3], [2, 2, 1, 1], [3, 0, 2, 1], [0, 2, 3, 1]], dtype=np.int32)
FIRST = (np.cumsum(SIZES, 1) - SIZES).astype(np.int32)
GOALS = (np.cumsum(SIZES, 0) - SIZES).astype(np.int32)


def mine(table):
    """The row of this rank, of numbers that every rank knows."""
    row, me = jnp.zeros(N, jnp.int32), lax.axis_index("ep")
    for rank in range(N):
        row = jnp.where(me == rank, table[rank], row)
    return row


def sent(x, output, sizes=SIZES, first=FIRST, goals=GOALS, came=SIZES.T):
    numbers = [mine(table) for table in (first, sizes, goals, came)]
    return lax.ragged_all_to_all(x, output, *numbers, axis_name="ep")


def split(body):
    return shard_map(body, mesh=AbstractMesh((N,), ("ep",)), in_specs=(P("ep"), P("ep")), out_specs=P("ep"), check_vma=False)


def regrouped(x, output):
    """What the ranks hold together, with the rows in the order of their receivers."""
    received = []
    for receiver in range(N):
        rows = output[receiver * 8 : receiver * 8 + 8]
        for sender in range(N):
            size, begin, goal = (int(each[sender, receiver]) for each in (SIZES, FIRST, GOALS))
            begin += sender * ROWS
            rows = jnp.concatenate([rows[:goal], x[begin : begin + size], rows[goal + size :]])
        received.append(rows)
    return jnp.concatenate(received)


ARGS = (jax.ShapeDtypeStruct((N * ROWS, 2), jnp.float32), jax.ShapeDtypeStruct((N * 8, 2), jnp.float32))


def verify(sequential, distributed):
    return gg_jax.verify(sequential, distributed, mesh={"ep": N}, args=ARGS)


def test_rows_go_where_they_are_sent_and_others_stay():
    assert verify(regrouped, split(sent)).verdict == "verified"
    zeros = verify(lambda x, y: regrouped(x, 0 * y), split(lambda x, y: sent(x, jnp.zeros((8, 2)))))
    assert zeros.verdict == "verified"
    swapped = FIRST.copy()
    swapped[1] = [2, 0, 4, 5]
    assert verify(regrouped, split(lambda x, y: sent(x, y, first=swapped))).verdict == "refuted"


def test_rows_that_come_back_are_what_was_sent():
    def there_and_back(x, output):
        got = sent(x, jnp.zeros((8, 2)))
        return sent(got * 2, jnp.zeros((ROWS, 2)), SIZES.T, GOALS.T, FIRST.T, SIZES)

    assert verify(lambda x, y: 2 * x, split(there_and_back)).verdict == "verified"
    assert verify(lambda x, y: 3 * x, split(there_and_back)).verdict == "refuted"


def test_gradients_go_back_and_are_not_proved_yet():
    def loss(function):
        return jax.grad(lambda x, y: jnp.sum(jnp.sin(function(x, y))))

    there = split(lambda x, y: sent(x, jnp.zeros((8, 2))))
    assert verify(loss(lambda x, y: regrouped(x, 0 * y)), loss(there)).verdict == "unproven"
    assert verify(loss(lambda x, y: regrouped(2 * x, 0 * y)), loss(there)).verdict == "refuted"


def test_the_graphs_compute_what_is_said_of_it():
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(each.shape).astype(np.float32) for each in ARGS)
    captured = gg_jax.capture(regrouped, split(sent), mesh={"ep": N}, args=ARGS)
    inputs = {"x": torch.from_numpy(x), "output": torch.from_numpy(y)}
    for rank, run in enumerate(replay_joint(captured.joint, [inputs] * N)):
        wanted = y[rank * 8 : rank * 8 + 8].copy()
        for sender in range(N):
            size, begin, goal = (int(each[sender, rank]) for each in (SIZES, FIRST, GOALS))
            wanted[goal : goal + size] = x[sender * ROWS + begin : sender * ROWS + begin + size]
        np.testing.assert_allclose(run["out"].numpy(), wanted)


def test_what_does_not_fit_or_is_not_known_is_refused():
    other, far, onto = SIZES.T.copy(), FIRST.copy(), GOALS.copy()
    other[2, 1], far[3, 2], onto[1, 0] = 4, 5, 0
    data = split(lambda x, y: lax.ragged_all_to_all(x, y, *[jnp.int32(x[:N, 0])] * 4, axis_name="ep"))
    for program, text in (
        (split(lambda x, y: sent(x, y, came=other)), "rank 1 sends 1 rows to rank 2, which expects 4"),
        (split(lambda x, y: sent(x, y, first=far)), "a piece begins before its array or ends behind it"),
        (split(lambda x, y: sent(x, y, goals=onto)), "two pieces are written to one place"),
        (data, "its offsets and sizes are data, so what goes where is not known"),
    ):
        with pytest.raises(CaptureError) as error:
            verify(regrouped, program)
        assert str(error.value).endswith(f"the primitive ragged_all_to_all: {text}")

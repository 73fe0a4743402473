"""Writes what XLA's partitioner is given and what it writes, for some programs on dp 2 x tp 4: `partitioned.py FOLDER`."""

import os
import sys
from pathlib import Path

folder = sys.argv[1]
os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=spmd.*"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import case, pipelines, tensor_parallel, vocabulary  # which ask for eight devices
from jax_cases.case import with_grads

mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def placed(*axes):
    return NamedSharding(mesh, P(*axes))


def unrolled(params, x):
    for layer in range(2):
        x = pipelines.block(x, jax.tree.map(lambda w: w[layer], params), 8, 4, 4, lambda y: y)
    return x


def remat(params, x):
    return pipelines.decoder(params, x, remat=True)


def convolved(x, kernel):
    return jnp.tanh(lax.conv(x, kernel, (1, 1), "SAME"))


def ordered(x, y):
    return jnp.sort(x, axis=1), lax.sort((x, y), dimension=1, num_keys=1)[1]


def chosen(x, w):
    return lax.cond(x[0, 0] > 0, lambda y: jnp.sin(y), lambda y: y * 2, x @ w)


BATCHES = (pipelines.shapes(2), case.S(2, 6, 16))
batch, column, row, whole = placed("dp"), placed(None, "tp"), placed("tp"), placed()
layers = {name: placed(*spec) for name, spec in pipelines.LAYERS.items()}
PROGRAMS = {
    "mlp": (with_grads(tensor_parallel.mlp, 1, 2), (batch, column, row), (whole, (column, row)), tensor_parallel.MLP_ARGS),
    "attention": (with_grads(tensor_parallel.attention, 1, 2, 3, 4), (batch, column, column, column, row),
                  (whole, (column, column, column, row)), tensor_parallel.ATTENTION_ARGS),
    "embedding": (with_grads(vocabulary.taken, 1), (batch, row), (whole, (row,)), vocabulary.EMBEDDING_ARGS),
    "cross_entropy": (jax.value_and_grad(vocabulary.cross_entropy, (0, 1)), (batch, column, batch), (whole, (batch, column)),
                      vocabulary.CE_ARGS),
    "unrolled": (unrolled, (layers, whole), whole, pipelines.DECODER_ARGS),
    "looped": (pipelines.decoder, (layers, whole), whole, pipelines.DECODER_ARGS),
    "unrolled_trained": (with_grads(unrolled, 0, 1), (layers, batch), (whole, (layers, batch)), BATCHES),
    "looped_trained": (with_grads(remat, 0, 1), (layers, batch), (whole, (layers, batch)), BATCHES),
    "convolved": (with_grads(convolved, 0, 1), (batch, row), (whole, (batch, row)), (case.S(4, 3, 6, 6), case.S(8, 3, 3, 3))),
    "ordered": (ordered, (batch, batch), (batch, batch), (case.S(4, 6), case.S(4, 6))),
    "chosen": (chosen, (batch, row), batch, (case.S(8, 4), case.S(4, 6))),
}  # fmt: skip
for name, (function, given, returned, args) in PROGRAMS.items():

    def program(*args, function=function):
        return function(*args)

    program.__name__, program.__wrapped__ = name, function
    jax.jit(program, in_shardings=given, out_shardings=returned).lower(*args).compile()

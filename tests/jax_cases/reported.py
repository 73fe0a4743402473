"""Faults that users of JAX and XLA reported, as programs with shard_map: each beside its repair."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import PartitionSpec as P

from .case import Case, S, i32, mesh_of

DP, TP, DP_TP = {"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}


# ---------------------------------------------------------------------- jax-ml/jax #3970
def squares(w, data):
    return jnp.sum((w**2 + 1) * data)


def gradient_of_sum(reduced):
    @partial(shard_map, mesh=mesh_of(DP), in_specs=(P(), P("dp")), out_specs=(P(), P()), check_vma=False)
    def body(w, data):
        return reduced(w, data)

    return body


def of_summed_loss(w, data):
    return jax.value_and_grad(lambda w: lax.psum(squares(w, data), "dp"))(w)  # fault: each rank has its own gradient


def summed_after(w, data):
    return lax.psum(jax.value_and_grad(squares)(w, data), "dp")


# ---------------------------------------------------------------------- jax-ml/jax #36886
def response(params, sample):
    return jnp.tanh(jnp.dot(params, sample))


def gradients_by_sample(params, samples):
    return jax.vmap(jax.grad(response), (None, 0))(params, samples)


def split_samples(own):
    """With check_vma, parameters that are the same on all devices have gradients that are summed over them."""

    @partial(shard_map, mesh=mesh_of(DP), in_specs=(P(), P("dp")), out_specs=P("dp"))
    def body(params, samples):
        return gradients_by_sample(own(params), samples)  # fault: summed over the devices

    return body


# ---------------------------------------------------------------------- openxla/xla #42481
def words(table, ids):
    return jnp.sum(jnp.sin(jnp.take(table, ids, axis=0)))


def rows_of_gradient(reduced):
    """Each rank looks up other positions, and keeps its rows of the table's gradient."""

    @partial(shard_map, mesh=mesh_of(TP), in_specs=(P(), P("tp")), out_specs=P("tp"), check_vma=False)
    def body(table, ids):
        grad = jax.grad(words)(table, ids)
        return reduced(grad, lambda x: lax.dynamic_slice_in_dim(x, lax.axis_index("tp") * 4, 4))

    return body


def cut_then_summed(grad, own):
    return lax.psum(own(grad), "tp")  # fault: other rows on each rank


def summed_then_cut(grad, own):
    return own(lax.psum(grad, "tp"))


# ---------------------------------------------------------------------- openxla/xla #40034
def product(x, w):
    return x @ w


def both_axes_split(reduced):
    """What is summed over lies along both axes, and the result along one of them."""

    @partial(
        shard_map, mesh=mesh_of(DP_TP), in_specs=(P(None, ("dp", "tp")), P(("dp", "tp"))), out_specs=P("tp"), check_vma=False
    )
    def body(x, w):
        return reduced(lax.psum_scatter(x @ w, "tp", scatter_dimension=0, tiled=True))  # fault: not summed over dp

    return body


def over_dp(part):
    return lax.psum(part, "dp")


# ---------------------------------------------------------------------- huggingface/transformers #18458, #19494 (flax)
def total_and_count(w, x, y, kept):
    return jnp.sum((x @ w - y) ** 2 * kept), jnp.sum(kept)


def masked_mean(w, x, y, kept):
    total, count = total_and_count(w, x, y, kept)
    return total / count


def by_device(own):
    @partial(shard_map, mesh=mesh_of(DP), in_specs=(P(), P("dp"), P("dp"), P("dp")), out_specs=(P(), P()), check_vma=False)
    def body(w, x, y, kept):
        return own(w, x, y, kept)

    return body


def mean_of_means(w, x, y, kept):
    return lax.pmean(jax.value_and_grad(masked_mean)(w, x, y, kept), "dp")  # fault: devices keep unequal numbers


def mean_over_all(w, x, y, kept):
    (loss, count), grad = jax.value_and_grad(total_and_count, has_aux=True)(w, x, y, kept)
    loss, count, grad = lax.psum((loss, count, grad), "dp")
    return loss / count, grad / count


LOSS_ARGS, SAMPLE_ARGS = (S(), S(8)), (S(3), S(8, 3))
TABLE_ARGS, IDS = (S(16, 4), S(8, dtype=i32)), {"ids": (0, 16)}
MASKED_ARGS = (S(3), S(8, 3), S(8), S(8))
PRODUCT_ARGS = (S(8, 16), S(16, 4))
WANTED = jax.value_and_grad(squares)
ALL = [
    Case("jax 3970", WANTED, gradient_of_sum(of_summed_loss), DP, LOSS_ARGS, expect="refuted"),
    Case("jax 3970, repaired", WANTED, gradient_of_sum(summed_after), DP, LOSS_ARGS),
    Case("jax 36886", gradients_by_sample, split_samples(lambda p: p), DP, SAMPLE_ARGS, expect="refuted"),
    Case(
        "jax 36886, repaired",
        gradients_by_sample,
        split_samples(lambda p: lax.pcast(p, "dp", to="varying")),
        DP,
        SAMPLE_ARGS,
    ),
    Case("xla 42481", jax.grad(words), rows_of_gradient(cut_then_summed), TP, TABLE_ARGS, IDS, expect="refuted"),
    Case("xla 42481, repaired", jax.grad(words), rows_of_gradient(summed_then_cut), TP, TABLE_ARGS, IDS),
    Case("xla 40034", product, both_axes_split(lambda y: y), DP_TP, PRODUCT_ARGS, expect="refuted"),
    Case("flax 19494", jax.value_and_grad(masked_mean), by_device(mean_of_means), DP, MASKED_ARGS, expect="refuted"),
    Case("flax 19494, repaired", jax.value_and_grad(masked_mean), by_device(mean_over_all), DP, MASKED_ARGS),
    Case("xla 40034, repaired", product, both_axes_split(over_dp), DP_TP, PRODUCT_ARGS),
]

"""How each primitive of JAX becomes ATen calls and communication. Importing this package registers all rules."""

from graphguard.capture.jax.rules import (  # noqa: F401
    calls,
    communication,
    convolutions,
    elementwise,
    gathers,
    kernels,
    orders,
    ragged,
    randoms,
    reductions,
    scatters,
    shapes,
)

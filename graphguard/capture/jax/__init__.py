"""The front end for JAX: jaxprs become graphs of ATen operators and of communication."""

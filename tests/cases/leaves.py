"""Leaves that require gradients, and the gradients of all of them."""

import torch


def leaves(tensors):
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


def gradients(result, wanted, upstream=None):
    """The gradient of every wanted leaf, by name."""
    return dict(zip(wanted, torch.autograd.grad(result, list(wanted.values()), upstream), strict=True))

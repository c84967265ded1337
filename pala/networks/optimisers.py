"""Optimisers' steps on flat parameters, and the limit on a gradient's norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad


def rmsprop_(
    parameters: Tensor,
    gradient: Tensor,
    mean_square: Tensor,
    learning_rate: float,
    alpha: float,
    epsilon: float,
    epsilon_inside_root: bool,
    known_share: float = 1.0,
) -> None:
    """Make one RMSprop step in place: v <- alpha v + (1 - alpha) g^2, then x <- x - lr g / denominator.

    The denominator is sqrt(u) + epsilon as in PyTorch (and GALA), or sqrt(u + epsilon) as in TensorFlow, with u = v /
    `known_share`. The former is AdaGrad's step for s = v / (1 - alpha), whose sum alpha s + g^2 forgets; on a CPU it
    takes 0.6 of the time.
    """
    learning_rate *= math.sqrt(known_share)
    epsilon *= known_share if epsilon_inside_root else math.sqrt(known_share)
    rest = 1 - alpha
    if parameters.device.type == "cpu" and not epsilon_inside_root:
        root = math.sqrt(rest)
        mean_square.mul_(alpha / rest)
        adagrad_(parameters, gradient, mean_square, learning_rate / root, epsilon / root)
        mean_square.mul_(rest)
        return
    mean_square.mul_(alpha).addcmul_(gradient, gradient, value=rest)
    denominator = (mean_square + epsilon).sqrt_() if epsilon_inside_root else mean_square.sqrt().add_(epsilon)
    parameters.addcdiv_(gradient, denominator, value=-learning_rate)


def adagrad_(
    parameters: Tensor, gradient: Tensor, sum_of_squares: Tensor, learning_rate: float, epsilon: float
) -> None:
    """Make one AdaGrad step in place (Duchi et al. 2011): s <- s + g^2, then x <- x - lr g / (sqrt(s) + epsilon).

    Torch's fused kernel goes through memory once: a third of the time.
    """
    adagrad(
        [parameters],
        [gradient],
        [sum_of_squares],
        [torch.zeros(())],
        fused=True,
        lr=learning_rate,
        weight_decay=0.0,
        lr_decay=0.0,
        eps=epsilon,
        maximize=False,
    )


def clip_gradient_(gradient: Tensor, max_norm: float) -> float:
    """Scale the flat gradient to at most `max_norm` (0: leave it); returns the norm before."""
    norm = float(gradient.norm())
    if 0 < max_norm < norm:
        gradient.mul_(max_norm / (norm + 1e-6))
    return norm

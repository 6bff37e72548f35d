"""Reproducible arithmetic: the same bits for any summation order, batch and memory layout.

Floating-point sums depend on their order, and vector units round function values differently from
scalar code. Hence a token's results usually depend on its batch. This module avoids both:

- The terms of a sum are first rounded to a common grid, coarse enough that every partial sum is an
  integer multiple of the grid step below 2**53. float64 adds such numbers without rounding, so the
  order, the kernel and the number of threads do not matter. Matrix products are split into two such
  slices (Ozaki, Ogita, Oishi, Rump 2012, "Error-free transformations of matrix multiplication"), to
  36 bits below the largest entry of a row; float32 has 24.
- Functions are float64 polynomials of sums and products, which IEEE 754 rounds correctly, so vector
  and scalar code agree.

The grid of a sum depends only on the summed row. Zero entries, such as masked keys, have no effect.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SLICE_BITS = 18
MAX_TERMS = 2 ** (53 - 2 * SLICE_BITS)
"""Limit of products summed per entry of a matrix product."""
SUM_BITS = 35
MAX_SUMMANDS = 2 ** (53 - SUM_BITS)

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_EXP = tuple(1 / math.factorial(n) for n in range(15))
_SIN = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(9))
_COS = tuple((-1) ** n / math.factorial(2 * n) for n in range(10))
_ATANH = tuple(1 / (2 * n + 1) for n in range(13))
_ERF = tuple((-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(48))


def power_of_two(exponent: Tensor) -> Tensor:
    """Returns 2.0 ** exponent in float64, exactly, for integer exponents from -1022 to 1023."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def exponent_of(x: Tensor, dim: int) -> Tensor:
    """Returns the least e with |x| < 2**e along `dim`, which is kept; at least -400."""
    _, exponent = torch.frexp(x.abs().amax(dim, keepdim=True).double())
    return exponent.clamp(-400, 400)


def slices(x: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """x = (high + low * 2**-18) * 2**(exponent - 18); high and low are integers in float64."""
    scaled = x.double() * power_of_two(SLICE_BITS - exponent)
    high = scaled.round()
    low = ((scaled - high) * 2.0**SLICE_BITS).round()
    return high, low


Sliced = tuple[Tensor, Tensor, Tensor]
"""High and low slices, and the exponents."""


def sliced(x: Tensor, dim: int) -> Sliced:
    """Returns slices of x, with an exponent per line along `dim`."""
    if x.shape[dim] > MAX_TERMS:
        raise ValueError(f"sums of {x.shape[dim]} products are not exact; the limit is {MAX_TERMS}")
    exponent = exponent_of(x, dim)
    return *slices(x, exponent), exponent


def product(a: Sliced, b: Sliced) -> Tensor:
    """Matrix product in float64; a is sliced along its rows, b along its columns."""
    (a_high, a_low, a_exponent), (b_high, b_low, b_exponent) = a, b
    high = a_high @ b_high
    low = a_high @ b_low + a_low @ b_high
    total = high + low * 2.0**-SLICE_BITS
    return total * power_of_two(a_exponent - SLICE_BITS) * power_of_two(b_exponent - SLICE_BITS)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [..., M, K] @ b [..., K, N] in float64; b must not depend on other rows of the batch."""
    return product(sliced(a, -1), sliced(b, -2))


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """weights [..., M, K] @ values [..., K, N] in float64; rows of weight 0 have no effect.

    The exponents of the rows are moved into the weights, so only rows of nonzero weight determine
    the grid of a result.
    """
    exponent = exponent_of(values, -1)
    shifted = weights.double() * power_of_two(exponent).transpose(-1, -2)
    unit = torch.zeros_like(exponent[..., :1, :])
    return product(sliced(shifted, -1), (*slices(values, exponent), unit))


def total(x: Tensor, dim: int) -> Tensor:
    """Sum along `dim`, which is kept, in float64."""
    if x.shape[dim] > MAX_SUMMANDS:
        raise ValueError(
            f"sums of {x.shape[dim]} numbers are not exact; the limit is {MAX_SUMMANDS}"
        )
    exponent = exponent_of(x, dim)
    cells = (x.double() * power_of_two(SUM_BITS - exponent)).round()
    return cells.sum(dim, keepdim=True) * power_of_two(exponent - SUM_BITS)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Horner's rule."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x
        value = value + coefficient
    return value


def exp(x: Tensor) -> Tensor:
    """e ** x in float64, relative error about 1e-15; 0 below -700, infinite above 709."""
    x = x.double()
    whole = (x * math.log2(math.e)).round().clamp(-1020, 1023)
    rest = x - whole * _LN2_HIGH
    rest = rest - whole * _LN2_LOW
    value = _polynomial(_EXP, rest.clamp(-1, 1)) * power_of_two(whole.nan_to_num())
    value = torch.where(x < -700, 0.0, torch.where(x > 709, torch.inf, value))
    return torch.where(x.isnan(), x, value)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of normal numbers in float64; -inf at 0, NaN below."""
    x = x.double()
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    exponent = torch.where(small, exponent - 1, exponent).double()
    s = (mantissa - 1) / (mantissa + 1)
    value = _polynomial(_ATANH, s * s) * s * 2
    value = exponent * _LN2_HIGH + (value + exponent * _LN2_LOW)
    value = torch.where(x == 0, -torch.inf, torch.where(x == torch.inf, torch.inf, value))
    return torch.where(x < 0, torch.nan, value)


def sincos(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine in float64 of numbers up to about 1e6; error about 1e-15."""
    x = x.double()
    quarter = (x * (2 / math.pi)).round()
    rest = x
    for part in _HALF_PI:
        rest = rest - quarter * part
    square = rest * rest
    sine, cosine = _polynomial(_SIN, square) * rest, _polynomial(_COS, square)
    turn = quarter.remainder(4)
    odd = turn.remainder(2) == 1
    sign_sine = torch.where(turn >= 2, -1.0, 1.0)
    sign_cosine = torch.where((turn == 1) | (turn == 2), -1.0, 1.0)
    return torch.where(odd, cosine, sine) * sign_sine, torch.where(odd, sine, cosine) * sign_cosine


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e ** -x) in float64."""
    return 1 / (1 + exp(-x.double()))


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent in float64."""
    x = x.double()
    value = 1 - 2 / (exp(2 * x) + 1)
    return torch.where(x.abs() < 1e-4, x - x * x * x / 3, value)


def erf(x: Tensor) -> Tensor:
    """Error function in float64; error about 1e-12."""
    x = x.double()
    near = x.clamp(-3, 3)
    inner = _polynomial(_ERF, near * near) * near * (2 / math.sqrt(math.pi))
    far = x.abs().clamp(3, 20)
    fraction = far  # erfc(x) = e**-x**2 / sqrt(pi) / (x + (1/2)/(x + 1/(x + (3/2)/(x + ...))))
    for n in range(60, 0, -1):
        fraction = far + (n / 2) / fraction
    outer = 1 - exp(-far * far) / (math.sqrt(math.pi) * fraction)
    return torch.where(x.abs() <= 3, inner, outer * torch.sign(x))

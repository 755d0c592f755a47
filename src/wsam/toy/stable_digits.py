"""Numbers as text, with the digits that rounding does not change."""

import math

MAX_DECIMALS = 4
MAX_DIGITS = 3


def stable_decimals(spread: float, most: int = MAX_DECIMALS) -> int:
    """Return the number of decimals that a spread does not change: 2 spread <= one unit."""
    if not math.isfinite(spread):
        return 0
    if spread <= 0.5 * 10**-most:
        return most
    return max(0, math.floor(-math.log10(2 * spread)))


def stable_digits(value: float, spread: float) -> int:
    """Return the number of leading digits that a spread does not change, at most 3."""
    if spread == 0 or value == 0:
        return MAX_DIGITS
    if not math.isfinite(spread):
        return 0
    leading, unit = math.floor(math.log10(abs(value))), math.ceil(math.log10(2 * spread))
    return max(0, min(MAX_DIGITS, leading - unit + 1))


def thousandths(value: float, spread: float = 0.0) -> str:
    """Format 1000 times a value to its stable digits, with the spread if it has none.

    Example:
        >>> thousandths(0.0049012), thousandths(0.0049012, 2e-5), thousandths(0.0049, 9e-4)
        ('4.90', '4.9', '5 ± 0.9')
    """
    digits = stable_digits(value, spread)
    text = f"{1000 * value:#.{max(1, digits)}g}".rstrip(".")
    return text if digits or not math.isfinite(spread) else f"{text} ± {1000 * spread:.1g}"

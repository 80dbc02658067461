r"""Number ranges of a JSON schema, enforced digit by digit by a terminal expression in Lark.

Bounds are decimal numbers of any length, so nothing is rounded. A comparison with a bound is a
regular expression over the digits. For example "more than 12.5" is:

    [1-9][0-9]{2,} ...       more digits before the point
    [2-9][0-9] ...           the first digit that differs is larger
    1[3-9] ...
    12\.[6-9] ...            the same before the point, more after it
    12\.50*[1-9] ...

The expression of a range is the intersection of all numbers of bounded length, its lower bound and
its upper bound: `/.../ & /.../ & /.../`.

A complete number that no character may follow must leave the empty expression of at least one of
these. Otherwise the library fails if a special token follows, such as `</arg_value>`.
Therefore the expressions of integers do not contain a point.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from decimal import Context, Decimal
from fractions import Fraction

import msgspec

MAX_INT_DIGITS = 40
"""Digits before the point: the largest numbers of float32 and 128-bit integers have 39. A bound
with more digits is enforced too."""
MAX_FRACTION_DIGITS = 40
"""Digits after the point: enough for 128-bit decimals, and a model that repeats a digit must
stop."""
MAX_EXPONENT_DIGITS = 2
"""Digits of an exponent: a double can hold every such number, since its maximum is 1.8e308."""
MAX_BOUND_DIGITS = 400
"""Limit on the digits of a bound without an exponent: any double has at most 309 before the
point."""
MAX_LAST_DIGITS = 256
"""Limit on the different endings of multiples of a number, such as "00", "25", "50" and "75"."""
_NEVER_ABOVE = Decimal(10) ** (MAX_INT_DIGITS + 10**MAX_EXPONENT_DIGITS)
_SHOWN = Context(prec=40)

ZERO = Decimal(0)


class UnsupportedNumber(ValueError):
    """A bound or a divisor that no expression here can represent."""


class NumberRange(msgspec.Struct, frozen=True):
    """Numbers between bounds, optionally only integers, optionally only multiples of a number."""

    low: Decimal | None = None
    low_open: bool = False
    """Whether the bound itself is excluded."""
    high: Decimal | None = None
    high_open: bool = False
    integer: bool = False
    multiple_of: Fraction | None = None

    def __str__(self) -> str:
        low = (
            None
            if self.low is None
            else f"{'more than' if self.low_open else 'at least'} {self.low}"
        )
        high = None
        if self.high is not None:
            high = f"{'less than' if self.high_open else 'at most'} {self.high}"
        step = None
        if self.multiple_of is not None:
            step = f"a multiple of {shown_fraction(self.multiple_of)}"
        kind = "an integer" if self.integer else None
        return " and ".join(one for one in (kind, low, high, step) if one)

    def intersect(self, other: NumberRange) -> NumberRange:
        low, low_open = _tighter(self, other, "low", max)
        high, high_open = _tighter(self, other, "high", min)
        multiples = [one for one in (self.multiple_of, other.multiple_of) if one is not None]
        both = _common_multiple(*multiples) if len(multiples) == 2 else None
        return NumberRange(
            low,
            low_open,
            high,
            high_open,
            self.integer or other.integer,
            both or (multiples[0] if multiples else None),
        )

    def contains(self, value: Decimal) -> bool:
        return not self.intersect(NumberRange(value, False, value, False)).is_empty

    def with_whole_bounds(self) -> NumberRange:
        """Returns the same integers, with bounds that are integers."""
        low, high = self.low, self.high
        if low is not None:
            low = Decimal(math.floor(low) + 1 if self.low_open else math.ceil(low))
        if high is not None:
            high = Decimal(math.ceil(high) - 1 if self.high_open else math.floor(high))
        return NumberRange(low, False, high, False, self.integer, self.multiple_of)

    @property
    def step(self) -> Fraction | None:
        """All numbers in the range are multiples of this number; None if there is none."""
        if self.multiple_of is None:
            return Fraction(1) if self.integer else None
        return _common_multiple(self.multiple_of, Fraction(1)) if self.integer else self.multiple_of

    @property
    def is_empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        if self.step is None:
            open_ = self.low_open or self.high_open
            return self.low > self.high or (self.low == self.high and open_)
        least, most = self.multiples
        assert least is not None and most is not None
        return least > most

    @property
    def multiples(self) -> tuple[int | None, int | None]:
        """The least and the greatest number of `step`s in the range; None without a bound."""
        step = self.step
        assert step is not None
        least = most = None
        if self.low is not None:
            at = Fraction(self.low) / step
            least = math.floor(at) + 1 if self.low_open else math.ceil(at)
        if self.high is not None:
            at = Fraction(self.high) / step
            most = math.ceil(at) - 1 if self.high_open else math.floor(at)
        return least, most


def _tighter(
    one: NumberRange, two: NumberRange, side: str, choose: Callable[..., Decimal]
) -> tuple[Decimal | None, bool]:
    found = [
        (bound, getattr(each, f"{side}_open"))
        for each in (one, two)
        if (bound := getattr(each, side)) is not None
    ]
    if not found:
        return None, False
    bound = choose(value for value, _ in found)
    return bound, any(is_open for value, is_open in found if value == bound)


def _common_multiple(one: Fraction, two: Fraction) -> Fraction:
    """Returns the least number that is a multiple of both."""
    return Fraction(
        math.lcm(one.numerator * two.denominator, two.numerator * one.denominator),
        one.denominator * two.denominator,
    )


def shown_fraction(value: Fraction) -> str:
    """Returns a fraction for an error message, with up to 40 digits."""
    return str(_SHOWN.divide(Decimal(value.numerator), Decimal(value.denominator)))


def number_text(value: Decimal) -> str:
    """Returns a number in digits without an exponent, as short as possible."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def number_terminal(numbers: NumberRange) -> str:
    """Returns the terminal expression of a range that is not empty. Raises `UnsupportedNumber`."""
    numbers = numbers.with_whole_bounds() if numbers.integer else numbers
    low = _needed(numbers.low, numbers.high, -1)
    high = _needed(numbers.high, numbers.low, 1)
    if low is not None and low == high:
        return f'"{number_text(low)}"'
    divisor = _divisor(numbers)
    digits = [_num_digits(bound) for bound in (low, high) if bound is not None]
    ints, fractions = max([MAX_INT_DIGITS, *digits]), max([MAX_FRACTION_DIGITS, *digits])
    fraction = "" if numbers.integer else rf"(\.[0-9]{{1,{fractions}}})?"
    plain = f"(0|[1-9][0-9]{{0,{ints - 1}}}){fraction}"
    if low is None and high is None:
        free = not (numbers.integer or divisor)
        exponent = rf"([eE][-+]?[0-9]{{1,{MAX_EXPONENT_DIGITS}}})?" if free else ""
        return " & ".join([f"/-?{plain}{exponent}/", *divisor])
    parts = []
    if high is None or high > 0 or (high == 0 and not numbers.high_open):
        least = None if low is None or (low <= 0 and not (low == 0 and numbers.low_open)) else low
        parts.append(
            _between(
                plain,
                "",
                NumberRange(least, numbers.low_open, high, numbers.high_open, numbers.integer),
            )
        )
    if low is None or low < 0:
        most = None if low is None else low.copy_negate()
        # Not "-0": it would be the number 0, which the range may exclude.
        least, is_open = ZERO, True
        if high is not None and high < 0:
            least, is_open = high.copy_negate(), numbers.high_open
        parts.append(
            _between(
                plain, "-", NumberRange(least, is_open, most, numbers.low_open, numbers.integer)
            )
        )
    choice = " | ".join(f"({part})" for part in parts)
    return " & ".join([f"({choice})", *divisor])


def _needed(bound: Decimal | None, other: Decimal | None, side: int) -> Decimal | None:
    """Returns a lower (side -1) or upper (side 1) bound. Returns None if it lies beyond all numbers
    that may be written: the other bound decides how long these are, unless it is far off itself."""
    if bound is None:
        return None
    beyond = _NEVER_ABOVE
    if other is not None and _outwards(other, -side) <= _NEVER_ABOVE:
        beyond = max(beyond, Decimal(10) ** _num_digits(other))
    if _outwards(bound, side) > beyond:
        return None
    if len(number_text(bound)) > MAX_BOUND_DIGITS:
        raise UnsupportedNumber(
            f"is {bound:.6g} and has more than {MAX_BOUND_DIGITS} digits, the limit"
        )
    return bound


def _outwards(bound: Decimal, side: int) -> Decimal:
    # Not by arithmetic, which rounds to 28 digits.
    return bound if side == 1 else bound.copy_negate()


def _num_digits(bound: Decimal) -> int:
    """Returns how many digits numbers next to a bound may have before the point, and after it."""
    return len(number_text(bound.copy_abs())) + 1


def _between(plain: str, sign: str, sizes: NumberRange) -> str:
    """Returns the expression of numbers with one sign whose absolute values are in a range."""
    fraction = "" if sizes.integer else _ANY_FRACTION
    parts = [f"/{sign}{plain}/"]
    if sizes.low is not None:
        found = _above(sizes.low, fraction, inclusive=not sizes.low_open)
        parts.append(f"/{sign}({'|'.join(found)})/")
    if sizes.high is not None:
        found = _below(sizes.high, fraction, inclusive=not sizes.high_open)
        parts.append(f"/{sign}({'|'.join(found)})/")
    return " & ".join(parts)


def _split(bound: Decimal) -> tuple[str, str]:
    """Returns the digits before and after the point."""
    whole, _, fraction = number_text(bound).partition(".")
    return whole, fraction


_ANY_FRACTION = r"(\.[0-9]*)?"


def _above(bound: Decimal, any_fraction: str, *, inclusive: bool) -> list[str]:
    """Returns alternatives that match the numbers above a bound, which is not negative.
    `any_fraction` is the expression of a fraction; empty for integers."""
    whole, fraction = _split(bound)
    found = [f"[1-9][0-9]{{{len(whole)},}}{any_fraction}"]
    for at, digit in enumerate(whole):
        if digit != "9":
            rest = len(whole) - at - 1
            found.append(f"{whole[:at]}[{int(digit) + 1}-9][0-9]{{{rest}}}{any_fraction}")
    for before, digit, same in _runs(fraction):
        if digit != "9":
            found.append(rf"{whole}\.{before}{same}[{int(digit) + 1}-9][0-9]*")
    found += [rf"{whole}\.{fraction}0*[1-9][0-9]*"] if any_fraction else []
    if inclusive:
        found.append(_equal(whole, fraction) if any_fraction else whole)
    return found


def _below(bound: Decimal, any_fraction: str, *, inclusive: bool) -> list[str]:
    """Returns alternatives that match the numbers below a bound, like `_above`."""
    whole, fraction = _split(bound)
    found = []
    if len(whole) > 1:
        found.append(f"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){any_fraction}")
    for at, digit in enumerate(whole):
        least = 1 if at == 0 and len(whole) > 1 else 0
        if int(digit) > least:
            rest = len(whole) - at - 1
            found.append(f"{whole[:at]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}{any_fraction}")
    found += [whole] if fraction else []
    for before, digit, same in _runs(fraction):
        found.append(rf"{whole}\.{before}{same}")
        if digit != "0":
            found.append(rf"{whole}\.{before}{same}[0-{int(digit) - 1}][0-9]*")
    if inclusive:
        found.append(_equal(whole, fraction) if any_fraction else whole)
    return found


def _runs(fraction: str) -> Iterator[tuple[str, str, str]]:
    """Yields each run of equal digits: the digits before it, its digit, and the expression of a
    shorter run. One expression for all places in a run keeps those of very small numbers short."""
    for run in re.finditer(r"(.)\1*", fraction):
        yield fraction[: run.start()], run[1], f"{run[1]}{{0,{len(run[0]) - 1}}}"


def _equal(whole: str, fraction: str) -> str:
    return rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0+)?"


def _divisor(numbers: NumberRange) -> list[str]:
    """Returns the expression of all multiples; empty if every number is one."""
    if numbers.multiple_of is None:
        return []
    step = numbers.step
    assert step is not None
    decimals = 0
    while (step * 10**decimals).denominator != 1:
        decimals += 1
        if decimals > MAX_FRACTION_DIGITS:
            raise UnsupportedNumber("is not a decimal number")
    units, found = (step * 10**decimals).numerator, []
    for shown in range(1 if numbers.integer else decimals + 1):
        found += _multiples(units // math.gcd(units, 10 ** (decimals - shown)), shown)
    if not numbers.integer:
        found = [f"{one}0*" if "." in one else rf"{one}(\.0+)?" for one in found]
    return [f"/-?({'|'.join(found)})/"]


def _multiples(units: int, decimals: int) -> list[str]:
    """Returns expressions of numbers with this many decimals that are multiples of `units` of the
    last decimal."""
    if units == 1:
        return ["[0-9]+" + (rf"\.[0-9]{{{decimals}}}" if decimals else "")]
    count = next((n for n in range(1, 20) if 10**n % units == 0), None)
    if count is None or 10**count // units > MAX_LAST_DIGITS:
        raise UnsupportedNumber(
            "is not a number whose multiples can be recognized by their last digits"
        )
    endings = [f"{value:0{count}}" for value in range(0, 10**count, units)]
    if count <= decimals:
        return [rf"[0-9]+\.[0-9]{{{decimals - count}}}({'|'.join(endings)})"]
    found = []
    for ending in endings:
        whole, fraction = ending[: count - decimals], ending[count - decimals :]
        behind = rf"\.{fraction}" if fraction else ""
        # A number may have fewer digits than its ending: 50 ends as 050 does.
        found += [f"[0-9]*{whole}{behind}", f"{whole.lstrip('0') or '0'}{behind}"]
    return found

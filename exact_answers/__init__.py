r"""Whether the last ``\boxed{}`` of a completion is the gold answer: exactly, in bounded time, whatever the text.

    >>> verify(r"The result is \boxed{\frac{1}{2}}.", gold="0.5")
    True

A package by itself: it needs math-verify and mpmath, and nothing of the library beside it, whose rewards pay by it.

There are three layers, each used only if the one before cannot decide: numbers and normalized text; expressions, whose
values are compared exactly at points for their letters; and math-verify for sums, integrals and limits, in processes
that are killed when they take too long. These are the conventions where mathematics leaves a choice:

- ``%``, ``\$`` and degree signs are dropped: ``50\%`` is 50, not one half. Between digits they separate two numbers.
  So are the marks of a formula, ``$``, ``\( \)`` and ``\[ \]``, and the second of doubled backslashes.
- Words after a number (``5\text{ cm}^2``, ``5 meters``) are its unit. A unit may be left out, but two units must
  agree: ``\text{m}`` with ``\text{meters}``, not with ``\text{cm}``. ``5\text{ squared}`` has no unit. Behind a space,
  nouns and units need no ``\text`` (``12 apples``, ``60 km/h``); ``5 x``, ``5 abc`` and ``5 is wrong`` have none.
- ``x=5`` is 5 if the other side has no equation, and likewise ``f(x)=2x`` is ``2x``, ``AB=5`` and
  ``\angle A=5^\circ`` are 5, ``(x,y)=(1,2)`` is ``(1,2)``; names are also powers and ratios of segments
  (``BC^2=5``, ``\frac{XY}{YZ}=5``), probabilities and expected values. In the answer, not in the gold answer, the left
  side may be any quantity: an expression of several letters (``m+n=73``), a ratio (``a:b=2:3``,
  ``\frac{V}{\pi}=75``), a sine, words (``\text{Smallest }n=50``). An equation for one letter that is not solved says
  nothing: ``x^2=5`` is not 5, and neither are a curve (``x^2+y^2=5``), a chain (``a+b=2+3=5``),
  a sentence, and ``\text{not }x=5``.
- ``x=1,y=2`` is ``(1,2)`` and ``1,2``, if the letters stand in the order of the alphabet: ``y=1,x=2`` is neither.
- ``2^n\text{ for all }n\ge2`` is ``2^n``, but two such conditions must agree.
- ``1,234`` is 1234, and so is ``1\,234``. A comma with a space after it separates numbers: ``48, 384`` is never 48384.
  Without the space, every gold of the benchmarks means thousands; so ``70,110`` is 70110, but compared to a list it is
  one too: ``110, 70``. ``70 000`` is a number; ``1 234`` is not, as spaces begin at five digits.
- ``(E)`` is E and ``(5)`` is 5, but ``[5]`` is not. Words may begin with a capital. ``1:2`` is not one half. A number
  base belongs to the number: ``52_8`` is neither 52 nor ``52_5``.
- A list without brackets is a set: its order does not matter, ``1,2`` is ``\{2,1\}``. Neither is the tuple ``(1,2)``.
  An inequality is its interval: ``x>2`` is ``(2,\infty)``.
  ``or`` and ``and`` separate like commas (``or`` of inequalities is their union), ``1\pm\sqrt{2}`` is a list of two.
- Numbers are compared exactly, unless a relative tolerance is given, and then only if one of them is not an integer.
- If the gold answer is a number, so must the answer be: ``2+3`` is not 5. Otherwise values count, not their form:
  a gold answer that is a product or a power, ``7^6`` and ``10^5`` too, may be given by its value.
- Markdown (``**73**``), quotation marks and an environment for display around an answer are dropped; ``sqrt(2)``,
  ``pi/3``, ``x**2``, ``abs(x)`` and ``v^2_0`` are ``\sqrt{2}``, ``\frac{\pi}{3}``, ``x^2``, ``|x|`` and ``v_0^2``.
- Degrees within functions are angles: ``\cos 80^\circ`` is ``\sin 10^\circ``.
- A box in ``<think>`` counts only if asked for (``boxes_in_thoughts``). What stands before a ``</think>`` without a
  beginning is thought, as the prompt's template may have written it, and so is all after a ``<think>`` without an end.
- Letters stand for positive numbers, with ``|x|`` for numbers of any sign, and for integers in the exponent of a
  negative number; ``e``, ``i`` and ``\pi`` stand for the constants. Where values are rounded, ``i`` to ``n``, ``p``
  and ``q`` stand for integers. ``\log`` without a base is the natural logarithm. Words are never read as products of
  letters.
"""

from exact_answers.arithmetic import evaluate_expression
from exact_answers.boxes import MAX_BOX, MAX_NESTING, TAIL, extract_boxed, find_last_box
from exact_answers.checker import (
    CONVENTIONS,
    AnswerKind,
    Convention,
    GoldAudit,
    MathChecker,
    answer_kind,
    audit_golds,
    same_answer,
    verify,
)
from exact_answers.lenient import extract_answer
from exact_answers.text import normalize_answer

__all__ = [
    "CONVENTIONS",
    "MAX_BOX",
    "MAX_NESTING",
    "TAIL",
    "AnswerKind",
    "Convention",
    "GoldAudit",
    "MathChecker",
    "answer_kind",
    "audit_golds",
    "evaluate_expression",
    "extract_answer",
    "extract_boxed",
    "find_last_box",
    "normalize_answer",
    "same_answer",
    "verify",
]

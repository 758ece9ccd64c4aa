"""The process behind ``SymbolicPool``: reads pairs of expressions, writes math-verify's verdict on each.

It runs as a script, so that it imports math-verify and nothing else; it ends with its input.
"""

from __future__ import annotations

import json
import re
import sys

PARSING_SECONDS = 2


def main(memory_limit: int, timeout: float) -> None:
    """Answer line by line.

    Address space is limited to ``memory_limit`` bytes and processor time to ``timeout`` seconds per pair, in case no
    one is left to kill this process.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compare(r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}")  # so that no pair pays for lazy imports
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + timeout) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        answer, gold = json.loads(line)
        print(compare(answer, gold), flush=True)


def compare(answer: str, gold: str) -> str:
    """``same``, ``different``, or ``unparsed`` if one of them is not understood as a whole."""
    from math_verify import verify

    try:
        target, source = read(answer), read(gold)
        if target is None or source is None:
            return "unparsed"
        return "same" if verify(source, target, float_rounding=30, timeout_seconds=PARSING_SECONDS) else "different"
    except MemoryError:
        return "crash"  # not an expected answer: the process is replaced
    except BaseException as error:  # math-verify's own timeout is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return "unparsed"


def read(text: str) -> object | None:
    """math-verify's expression, None if it is text, or if a letter was lost or added on the way.

    Names of bound letters do not count, and a limit is two-sided unless its point has a sign.
    """
    import sympy
    from math_verify import LatexExtractionConfig, parse

    text = re.sub(r"([_^])([0-9a-zA-Z]|[+-](?=\}))", r"\1{\2}", text)  # k^ni is read as an exponent of two letters
    found = parse(f"${text}$", [LatexExtractionConfig()], "no_fallback", "first_match", parsing_timeout=PARSING_SECONDS)
    if not found or not isinstance(found[0], sympy.Basic) or found[0].has(sympy.core.function.AppliedUndef):
        return None
    written = set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text))) - {"e", "i", "d"}
    known = {str(symbol.name) for symbol in found[0].atoms(sympy.Symbol)} - {"e", "i", "d"}
    if written != {name for name in known if len(name) == 1 and name.isalpha()}:  # a limit's direction is a symbol too
        return None
    expression = found[0]
    if not re.search(r"\\to[^}]*\^\{?[+-]", text):
        limits = [limit for limit in expression.atoms(sympy.Limit) if limit.args[2].is_finite]
        expression = expression.xreplace({limit: limit.func(*limit.args[:3], "+-") for limit in limits})
    expression = expression.as_dummy()
    letters = [symbol for symbol in expression.atoms(sympy.Symbol) if symbol.name[0].isalpha() or symbol.name[0] == "_"]
    plain: object = expression.xreplace({letter: sympy.Symbol(letter.name, real=True) for letter in letters})
    return plain  # the parser's assumptions on a letter depend on the others


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

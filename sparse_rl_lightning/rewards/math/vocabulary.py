"""The LaTeX commands that the reader of expressions knows."""

from __future__ import annotations

TIMES = ("*", "\\cdot", "\\times")
BRACKETS = {"{": "}", "(": ")", "[": "]", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
ROUNDED = {"\\lfloor": "floor", "\\lceil": "ceil"}

FUNCTIONS = frozenset(
    f"\\{name}"
    for name in (
        *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"),
        *("exp", "ln", "log", "lg"),
    )
)
"""Functions of one argument."""

GREEK = frozenset(
    f"\\{name}"
    for name in (
        *("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "kappa"),
        *("lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "hbar", "ell"),
        *("Gamma", "Delta", "Theta", "Lambda", "Sigma", "Phi", "Psi", "Omega"),
    )
)
"""Letters; pi is a number."""

MARKS = frozenset(
    f"\\{name}"
    for name in ("vec", "overrightarrow", "dot", "ddot", "bar", "overline", "hat", "tilde", "mathbb", "mathcal")
)
"""Commands that make a name out of a letter."""

PRIMARY = frozenset({"\\frac", "\\sqrt", "\\binom", "\\pi", "\\lfloor", "\\lceil"}) | FUNCTIONS | GREEK | MARKS
"""Commands that begin an operand."""

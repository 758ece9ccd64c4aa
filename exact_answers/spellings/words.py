r"""Words in answers: the commands around them, those that count things, and those that say otherwise."""

from __future__ import annotations

import re

TEXT_SPACE = "\x1f"
r"""A space between words of a text command; it is a space to ``\s`` and left out of comparisons."""
TEXT_COMMANDS = r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|mbox|operatorname)"
TEXT_CONTENT = re.compile(TEXT_COMMANDS + r"\s*\{([^{}]*)\}")
"""A text command with its content as the group."""
OTHERWISE = (  # \text{not }=5 is not a name for five
    "not|no|wrong|false|incorrect|never|without|except|than|half|halves|twice|thrice|doubled?|tripled?|quarter|squared|"
    "cubed|factorial|minus|plus|negative|opposite|reciprocal|inverse|dozens?|hundreds?|thousands?|[mbtr]+illions?"
)
"""A pattern of words that make a name say something else."""
CONDITIONS = "if|when|unless|suppose|assume|assuming|let|guess|maybe|for"
"""A pattern of beginnings of a phrase that does not say what the answer is."""
NO_NOUNS = frozenset(
    "unless where which whose while until about exactly fails failed impossible excluded excluding invalid instead "
    "rather before after cannot other others another maybe perhaps probably guess remainder".split()
)
"""Words of five letters and more that count nothing."""
NOUNS = frozenset(
    "ways man men boy boys girl girls kid kids cat cats dog dogs cow cows pig pigs hen hens egg eggs cup cups pen pens "
    "bag bags car cars hat hats toy toys pie pies ton tons lb lbs oz box nuts fish row rows set sets bit bits byte job "
    "jobs page side sides book game team seat card ball coin cake tree trip tile bar bars mph kph rpm gal bug bugs "
    "chips films floors knots boots hoops".split()
)
"""Counted nouns that could be a product of letters: longer words are told from one by their spelling."""
OF = frozenset("of per US sq red blue pink gray new big".split())
"""Short words beside a noun or a unit."""

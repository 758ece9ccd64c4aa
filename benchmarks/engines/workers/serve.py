"""The process of one engine: reads what to generate, a JSON line each, and answers how long it took.

Scripts beside this file run in virtual environments of their own, which have the engine and not this library: this file
and those of rivals import nothing of it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Settings = dict[str, Any]
Generate = Callable[[list[list[int]], int], list[int]]
"""From prompts and a count of new tokens to the tokens that each sequence has got."""


def serve(load: Callable[[Settings], Generate]) -> None:
    """Load the engine with the settings of the command line, and generate until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints goes where errors go
    generate = load(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        counts = generate(request["prompts"], request["new_tokens"])
        seconds = time.perf_counter() - start
        assert set(counts) == {request["new_tokens"]}, (
            f"{request['new_tokens']} tokens wanted, not {sorted(set(counts))}"
        )
        print(json.dumps({"seconds": seconds}), file=answers)

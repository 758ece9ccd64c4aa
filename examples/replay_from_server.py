"""A trainer elsewhere: a completion from ``sparse-rl serve``, replayed under the evictions that it was drawn with.

The server sends the completion with its eviction record. ``replay_logprobs`` runs the dense model once over prompt and
completion, hides from each token what had been evicted by then, and comes to the server's log-probs. The pass that sees
everything does not.

    sparse-rl serve --policy FOLDER --compressor '{class_path: RKV, init_args: {budget: 32, buffer: 16}}'
    python examples/replay_from_server.py http://127.0.0.1:8000 FOLDER "Once upon a time" 150
"""

from __future__ import annotations

import base64
import json
import os
import sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from transformers import AutoModelForCausalLM

from sparse_rl_lightning.integrations.record import record_from_bytes
from sparse_rl_lightning.logprobs import sequence_logprobs
from sparse_rl_lightning.replay import replay_logprobs

url, policy, prompt, max_tokens = sys.argv[1:5]
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('SPARSE_RL_API_KEY', 'none')}"}


def ask(path: str, body: dict[str, object] | None = None) -> bytes:
    """What the server answers."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url + path, data, headers)) as answer:
            return bytes(answer.read())
    except HTTPError as error:
        sys.exit(error.read().decode())


# 1. Ask for the record beside the completion. A small one comes in the answer, a large one waits for a while.
body = {"prompt": prompt, "max_tokens": int(max_tokens), "temperature": 0.8, "return_eviction_record": True}
choice = json.loads(ask("/v1/completions", body))["choices"][0]
sent = choice["eviction_record"]
if sent is None:
    sys.exit(choice["eviction_record_error"])
content = base64.b64decode(sent["data"]) if "data" in sent else ask(f"/v1/eviction_records/{sent['id']}")

# 2. Replay it with the same weights. The record has all tokens, the prompt's too.
record = record_from_bytes(content)
rollout, model = record.rollout(), AutoModelForCausalLM.from_pretrained(policy).eval()
with torch.no_grad():
    replayed = replay_logprobs(model, rollout, record.temperature)
    dense, _ = sequence_logprobs(model, rollout.sequences, rollout.completion_mask, record.temperature)
replayed_gap, dense_gap = ((logprobs - rollout.sampler_logprobs).abs().max() for logprobs in (replayed, dense))
print(
    f"{len(record.completion_tokens)} tokens, {len(record.evictions)} evictions in {len(content)} bytes; largest "
    f"difference from the server's log-probs: replayed {replayed_gap:.1e}, dense {dense_gap:.1e}"
)

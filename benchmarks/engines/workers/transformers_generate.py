"""transformers' ``generate``."""

import torch
from serve import Generate, Settings, serve
from transformers import AutoModelForCausalLM


def load(settings: Settings) -> Generate:
    """Its dynamic cache."""
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=settings["dtype"], trust_remote_code=False)
    model.eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> list[int]:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0,
        )  # fmt: skip
        return [out.shape[1] - ids.shape[1]] * len(out)

    return generate


serve(load)

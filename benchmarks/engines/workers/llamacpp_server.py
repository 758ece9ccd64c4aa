"""llama.cpp's server with a slot for every sequence."""

from concurrent.futures import ThreadPoolExecutor

import xllamacpp as llama
from serve import Generate, Settings, serve


def load(settings: Settings) -> Generate:
    """Keys and values in the type of the weights."""
    params = llama.CommonParams()
    params.model.path = settings["policy"]
    params.n_parallel = settings["sequences"]
    params.n_ctx = settings["sequences"] * settings["longest"]
    params.n_batch = params.n_ubatch = settings["sequences"] * settings["prompt_length"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_BF16
    server = llama.Server(params)
    pool = ThreadPoolExecutor(settings["sequences"])

    def generate(prompts: list[list[int]], new_tokens: int) -> list[int]:
        def one(prompt: list[int]) -> int:
            request = {
                "prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, "cache_prompt": False,
                "temperature": 1.0, "samplers": ["temperature"],
            }  # fmt: skip
            count: int = server.handle_completions(request)["usage"]["completion_tokens"]
            return count

        return list(pool.map(one, prompts))

    return generate


serve(load)

"""vLLM's build for CPUs, compiled."""

import os

from serve import Generate, Settings, serve


def set_environment(settings: Settings) -> None:
    """Name the count of threads and the memory of the cache, where vLLM reads them."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings["cache_gib"])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{settings['threads'] - 1}" if settings["threads"] > 1 else "0"
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"


def load(settings: Settings) -> Generate:
    """As it is installed, but for the count of threads and the memory of the cache."""
    set_environment(settings)
    from vllm import LLM, SamplingParams  # reads the environment

    model = LLM(
        settings["policy"], dtype=settings["dtype"], max_model_len=settings["longest"],
        max_num_seqs=settings["sequences"], enable_prefix_caching=False, seed=0,
    )  # fmt: skip

    def generate(prompts: list[list[int]], new_tokens: int) -> list[int]:
        params = SamplingParams(
            temperature=1.0, top_p=1.0, top_k=-1, min_tokens=new_tokens, max_tokens=new_tokens, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        out = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(request.outputs[0].token_ids) for request in out]

    return generate


if __name__ == "__main__":  # its engine is a process that imports this file again
    serve(load)

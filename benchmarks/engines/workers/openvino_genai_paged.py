"""OpenVINO GenAI's continuous batching, with its own cache eviction on request."""

import numpy as np
import openvino as ov
import openvino_genai as genai
from serve import Generate, Settings, serve

BLOCK = 32  # tokens of a block of the CPU's cache: sizes of eviction are multiples of it
NAMES = {"bfloat16": "bf16", "float32": "f32"}


def load(settings: Settings) -> Generate:
    """Evicting, it keeps budget + buffer: a block of first and one of recent tokens, others by attention."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = settings["cache_gib"]
    scheduler.max_num_seqs = settings["sequences"]
    scheduler.max_num_batched_tokens = settings["sequences"] * settings["prompt_length"]
    scheduler.enable_prefix_caching = False
    if settings["evicts"]:
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = genai.CacheEvictionConfig(
            start_size=BLOCK, recent_size=BLOCK, max_cache_size=settings["budget"] + settings["buffer"],
            aggregation_mode=genai.AggregationMode.NORM_SUM,
        )  # fmt: skip
    precision = NAMES[settings["dtype"]]
    properties = {
        "INFERENCE_NUM_THREADS": settings["threads"],
        "INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision,
    }  # fmt: skip
    pipeline = genai.ContinuousBatchingPipeline(settings["policy"], scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], new_tokens: int) -> list[int]:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample, config.temperature, config.top_p = True, 1.0, 1.0
        config.top_k = settings["vocabulary"]
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        return [len(result.m_generation_ids[0]) for result in results]

    return generate


serve(load)

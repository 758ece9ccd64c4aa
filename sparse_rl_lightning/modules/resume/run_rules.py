"""Whether a setting may be another one when a run is resumed, by its name in the configuration."""

from __future__ import annotations

from enum import Enum


class Rule(Enum):
    """What becomes of a setting that has changed since the checkpoint was written."""

    APPLIED = "the new value counts from here on, with a notice"
    BETWEEN_ROLLOUTS = "applied between two rollouts, refused within one that was drawn, or ordered, by the old value"
    IF_PARTIAL = "applied in partial rollouts, where the slots decide which groups are ready; else changes no result"
    REFUSED = "the weights mean something else with another value"
    DERIVED = "seen by what it makes: weights, config.json, vocabulary, rows, another setting, the optimizer"
    IGNORED = "changes no result, or none of training"


_SETTINGS = {
    Rule.BETWEEN_ROLLOUTS: {
        "": "module retriever steps_per_generation num_iterations replay_objective",
        "trainer": "candidates",  # which callbacks read the sampler's most likely tokens
    },
    Rule.IF_PARTIAL: {"rollout": "num_slots memory_limit"},
    Rule.REFUSED: {"policy": "lora_alpha", "adapter": "lora_alpha"},
    Rule.DERIVED: {
        "policy": """path model tokenizer policy architecture alphabet hidden_size num_layers num_heads num_kv_heads r
            target_modules quantization seed""",
        "adapter": "r target_modules lr seed",
        "sampling": "seed",
        "val_sampling": "seed",
        "rollout": "generation_kwargs",
        "data": """prompts_per_rollout seed tasks num_terms digits num_train path prompt_column answer_column
            answer_pattern math_answers solution_column prompt_template as_chat system_prompt config split folder
            benchmarks own prompt_format train max_rows final_assistant""",
        "": "optimizer lr_scheduler",
    },
    Rule.IGNORED: {
        "learner": "head_chunk_size gradient_checkpointing",
        "rollout": "keep_pool cuda_graphs decoder",
        "sampling": "top_logprobs",
        "data": "val_batch_size max_val_prompts num_val val_path val_split val_benchmarks",
        "trainer": """max_steps max_epochs max_time log_every_n_steps val_check_interval limit_val_batches logger
            default_root_dir accelerator devices num_nodes strategy""",
    },
}
RULES = {
    f"{group}.{name}".lstrip("."): rule
    for rule, groups in _SETTINGS.items()
    for group, names in groups.items()
    for name in names.split()
}
"""The rules of settings that have one by name; ``rule_of`` has that of the others."""


def rule_of(name: str) -> Rule:
    """The rule of a setting by its name; one of drawing is applied between two rollouts, any other simply applied."""
    return RULES.get(name, Rule.BETWEEN_ROLLOUTS if name.startswith("sampling.") else Rule.APPLIED)

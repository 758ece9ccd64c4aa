"""Which classes the generated pages list, in which order, and the sentences between them."""

from __future__ import annotations

from typing import Any

from sparse_rl_lightning import (
    budgets,
    callbacks,
    compressors,
    data,
    environments,
    modules,
    policies,
    retrievers,
    rewards,
)
from sparse_rl_lightning.budgets.schedules import LengthSchedule, PublishedSchedule, ScheduleFile
from sparse_rl_lightning.calibration.table import Binning
from sparse_rl_lightning.cli.calibrate import calibrate, hardware, statistics
from sparse_rl_lightning.distributed.deepspeed import SparseRLDeepSpeed
from sparse_rl_lightning.distributed.fsdp2 import SparseRLFSDP2
from sparse_rl_lightning.downsampling import MaxReward, MaxVariance, Shortest
from sparse_rl_lightning.rollout import SamplingParams

Group = tuple[str, str, list[Any]]  # heading, introduction, classes

SETTINGS_INTRO = """\
Every key of every class that a configuration may name. A configuration is what `sparse-rl fit --config FILE` reads:
`model`, `data` and `trainer`, each a class with its arguments (`class_path`, `init_args`), as in any LightningCLI. The
same keys work on the command line (`--model.sampling.num_generations=16`), where `--model.compressor.help=RKV` prints
the table of a class. `trainer` and what stands below it without a table here is Lightning's: `max_steps`, `precision`,
`devices`, `accumulate_grad_batches`, `gradient_clip_val`, `strategy`, `logger`. Callbacks have
[their own page](callbacks.md).

```yaml
model:
  class_path: SparseGRPO
  init_args:
    policy: Qwen/Qwen2.5-1.5B
    compressor: {class_path: RKV, init_args: {budget: 512, buffer: 128}}
    reward_funcs: sparse_rl_lightning.rewards.boxed_math_reward  # a function, by its import path
data:
  class_path: JsonlPrompts
  init_args: {path: train.jsonl, prompts_per_rollout: 16}
trainer:
  max_steps: 100
  callbacks:  # what a compressed cache needs, unless the module replays it (choosing.md)
    - {class_path: ImportanceReweighting, init_args: {clip_max: 1.5}}
```

A file that begins with `base: other.yaml` has the keys of that file, found beside it, and overrides them with its own:
mappings are merged, lists replaced, and `callbacks+` appends ([example](quickstart.md#change-something)). Without a
`logger`, `CSVLogger` writes `metrics.csv` into a `version_*` folder of `trainer.default_root_dir`; a logger takes its
place, or is added to it ([loggers](lightning.md#loggers)).

Beside them there are two keys of the whole process: `seed_everything` (default 0), and `num_threads`, the CPU threads
of torch (default: torch's own choice). A `seed` that is null takes that of `seed_everything`, in Python that of
`lightning.seed_everything`: prompts, samples, adapters and tiny policies of two runs with different ones differ, and
`run_config.yaml`, the report and checkpoints say which were taken. A class of yours is named by its import path and has
its own keys."""

COMPRESSORS = [getattr(compressors, name) for name in compressors.__all__ if name != "QueryStatistics"]
WRAPPERS = [compressors.Combined, compressors.Smoothed]
METHODS = [c for c in COMPRESSORS if c not in (compressors.Compressor, *WRAPPERS)]

GROUPS: list[Group] = [
    (
        "Modules",
        "`model.class_path`. [Replay](corrections.md#exact-replay), "
        "[DistillSparse](sparrow.md#distillsparse) and [evaluation](evaluation.md) have pages or sections.",
        [
            modules.SparseGRPO,
            modules.ReplayGRPO,
            modules.DistillSparse,
            modules.Evaluation,
            modules.SupervisedWarmup,
        ],
    ),
    (
        "Parts of a module",
        "`model.init_args.sampling` and `.val_sampling`, `.rollout`, `.loss`, `.learner` and `.adapter`. They are "
        "written without `class_path`, and a key that is left out keeps the module's default: "
        "`--model.sampling.temperature=0.7` leaves the other keys of `sampling` as they are.",
        [SamplingParams, modules.RolloutOptions, modules.GRPOLoss, modules.LearnerOptions, modules.SparseAdapter],
    ),
    (
        "Down-sampling",
        "`model.init_args.rollout.downsampling`, of modules that train: which samples of a prompt are kept.",
        [MaxVariance, MaxReward, Shortest],
    ),
    (
        "Policies",
        "`model.init_args.policy`. A text is short for `PretrainedPolicy` with that path.",
        [policies.PretrainedPolicy, policies.LoraPolicy, policies.TinyPolicy],
    ),
    (
        "Compressors",
        "`model.init_args.compressor`. All of them have the keys of `Compressor`, which is not a method by itself; "
        "those listed under a method come on top. [Compressors](compressors.md) has formulas and measurements.",
        [compressors.Compressor, *METHODS],
    ),
    ("Around compressors", "They take other compressors and have the sizes of these.", WRAPPERS),
    (
        "Budget rules",
        "`budget_rule` of a compressor or retriever.",
        [budgets.Uniform, budgets.Pyramid, budgets.Adaptive],
    ),
    (
        "Schedules",
        "`budget` of a compressor or retriever, in place of a number.",
        [LengthSchedule, ScheduleFile, PublishedSchedule],
    ),
    (
        "Retrievers",
        "`model.init_args.retriever`. All of them have the keys of `Retriever`, which is not a method by itself.",
        [retrievers.Retriever, *[getattr(retrievers, n) for n in retrievers.__all__ if n != "Retriever"]],
    ),
    (
        "Data",
        "`data.class_path`. All of them have the keys of `PromptDataModule`, the base of a data module of your own.",
        [data.PromptDataModule, data.ArithmeticTasks, data.JsonlPrompts, data.MathBenchmarks, data.ReasoningGym],
    ),
    (
        "Rewards",
        "`model.init_args.reward_funcs` takes functions by their import path, one or a list, and objects such as this "
        "one. The functions shipped are `arithmetic_reward`, `worked_steps_reward`, `boxed_math_reward` and "
        "`boxed_format_reward` in `sparse_rl_lightning.rewards`, and `reasoning_gym_reward` in "
        "`sparse_rl_lightning.data.gym`.",
        [rewards.MathReward],
    ),
    (
        "Environments",
        "What answers a policy during a conversation; a class of your own derives from `Environment`.",
        [environments.Calculator],
    ),
    (
        "Strategies",
        "`trainer.strategy`, by name or by class. [Several GPUs](scaling.md) says when to use which.",
        [SparseRLDeepSpeed, SparseRLFSDP2],
    ),
    (
        "Calibration",
        "The keys of `sparse-rl calibrate --config FILE`, of `sparse-rl calibrate --hardware` and of "
        "`sparse-rl statistics`.",
        [calibrate, Binning, hardware, statistics],
    ),
]

CALLBACKS_INTRO = """\
One behavior each, switched on by a line under `trainer.callbacks`, or on the command line with
`--trainer.callbacks+=TIS`. Callbacks that change what a rollout counts for run before those that only read it, whatever
their order in the file. The numbers they log are explained with the others in [logged metrics](metrics.md)."""

OWN = list(modules.SparseGRPO.default_callbacks)
CORRECTIONS = [callbacks.SparsityAwareRejection, callbacks.ImportanceReweighting]
PUBLISHED = [
    callbacks.TIS, callbacks.IcePop, callbacks.CIS, callbacks.SequenceTIS, callbacks.GeometricTIS,
    callbacks.SequenceMIS, callbacks.SequenceMaskTIS, callbacks.MIS,
]  # fmt: skip
TAIL = [callbacks.AcceptanceMonitor, callbacks.TailGuard, callbacks.MismatchSplit]
_LISTED = [*OWN, *CORRECTIONS, *PUBLISHED, *TAIL, callbacks.RolloutCallback, callbacks.CorrectionCallback]
READING = [thing for name in callbacks.__all__ if (thing := getattr(callbacks, name)) not in _LISTED]

CALLBACK_GROUPS: list[Group] = [
    ("Corrections", "The two halves of Sparse-RL. [Corrections](corrections.md) compares them.", CORRECTIONS),
    ("Published corrections", "The same by the names and with the defaults of their papers and programs.", PUBLISHED),
    ("Watching the mismatch", "[Sparrow](sparrow.md) says why the tail and not the mean.", TAIL),
    ("Seeing and keeping", "What a run prints and leaves behind.", READING),
    (
        "Added by the module itself",
        "Modules that roll out bring these along. Name one only to change its settings.",
        OWN,
    ),
]

SNIPPETS = {
    "SparsityAwareRejection": "{class_path: SparsityAwareRejection, init_args: {threshold: 1.0e-4}}",
    "ImportanceReweighting": "{class_path: ImportanceReweighting, init_args: {clip_max: 1.5}}",
    "TIS": "{class_path: TIS, init_args: {clip_max: 2.0}}",
    "AcceptanceMonitor": "{class_path: AcceptanceMonitor, init_args: {every_n_rollouts: 10, bin_size: 2000}}",
    "TailGuard": "{class_path: AcceptanceMonitor}\n    - {class_path: TailGuard, init_args: {mode: warn}}",
    "CompletionsTable": "{class_path: CompletionsTable, init_args: {every_n_rollouts: 10, num_samples: 3}}",
    "ExportPolicy": "{class_path: ExportPolicy, init_args: {folder: runs/mine/policy}}",
    "DryRun": "{class_path: DryRun, init_args: {enabled: true}}",
    "StepGuard": "{class_path: StepGuard, init_args: {max_in_a_row: 3}}",
    "ZeroSharding": "{class_path: ZeroSharding, init_args: {shadow_dtype: bfloat16, keep_shadow: false}}",
}

_REJECTION = "nothing of its own: `rejection_rate`, `token_mask_rate` and `kept_fraction` show what it did"
_RATIOS = "nothing of its own: `sampling/importance_sampling_ratio/*` and `mismatch/ess` show the ratios"
LOGS = {
    **dict.fromkeys(["TIS", "IcePop", "CIS", "SequenceTIS", "GeometricTIS", "SequenceMIS"], _RATIOS),
    "SparsityAwareRejection": _REJECTION,
    "SequenceMaskTIS": _REJECTION,
    "MIS": _REJECTION,
    "ImportanceReweighting": _RATIOS,
    "ScoreCentering": "`centering/covered`",
    "SamplerSupport": "`support/mean` and `support/cut`",
    "AcceptanceMonitor": "the `acceptance/` keys of the table above",
    "TailGuard": "`guard/tail_margin`, `guard/rejection_rate`, `guard/length_ratio`, `guard/budget` and `guard/raises`",
    "MismatchSplit": "`mismatch_split/{rounding,compression,routing}/{kl_k1,kl_k3,ratio_p05}`",
    "EmptyRollouts": "`empty_rollouts`",
    "StepGuard": "`grad_norm`, `distill/grad_norm`, `skipped_steps`",
    "StepTimes": "the keys of the table above",
    "ZeroSharding": "the keys of the table above",
    "DryRun": "nothing; it prints time and memory",
    "CompletionsTable": "the table itself, to the trainer's loggers that take one",
}

"""Cases of configurations and command lines; a name without anything else is what the user types behind ``--``."""

from __future__ import annotations

from typing import Any

from cases.case import Case

RKV = "model.compressor"


def model(values: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = values["model"]["init_args"]
    return arguments


def compressor(values: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = model(values)["compressor"]["init_args"]
    return arguments


def callback(values: dict[str, Any], place: int) -> dict[str, Any]:
    found: dict[str, Any] = values["trainer"]["callbacks"][place]
    return found


NUMBERS = [
    Case("model.loss.beta=.nan", "loss.beta must be a finite number, at least 0, got beta=nan.", 1),
    Case("model.reward_weights=[.nan,1]", "reward_weights[0] must be a finite number, got reward_weights[0]=nan.", 1),
    Case("seed_everything=99999999999999999999", "seed_everything must be at least 0 and at most 4294967295", 1),
    Case("`buffer: null` below the compressor", "buffer must be a number, got null. Leave the key out for the", 2,
         edit=lambda v: compressor(v).update(buffer=None)),
    Case("model.sampling.max_completion_length=5000", "leaves no room for a prompt in the model's context of 128", 1),
    Case("model.sampling.num_generations=2.5", "Expected a &lt;class 'int'&gt;. Got value: 2.5", 2),
    Case("a number in quotes, `num_generations: '2'`", edit=lambda v: model(v)["sampling"].update(num_generations="2")),
    Case("model.rollout.end_tokens=['<|im_end|>']", "are not in the tokenizer's vocabulary. Remove or correct them", 1),
]  # fmt: skip

TRAINER = [
    Case("`optimizer: {class_path: torch.optim.AdamW, init_args: {lr: .nan}}`",
         "model.optimizer: Invalid learning rate: nan", 1,
         "--model.optimizer=torch.optim.AdamW --model.optimizer.lr=.nan"),
    Case("`optimizer: {class_path: torch.optim.AdamW, init_args: {lr: .inf}}`",
         "model.optimizer.lr must be a finite number, at least 0, got lr=inf.", 1,
         "--model.optimizer=torch.optim.AdamW --model.optimizer.lr=.inf"),
    Case("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches must be at least 1", 1),
    Case("trainer.gradient_clip_val=.nan", "trainer.gradient_clip_val must be a finite number", 1),
    Case("`trainer: {max_step: 4}`", "Did you mean 'trainer.max_steps'", 2,
         edit=lambda v: v["trainer"].update(max_step=4)),
    Case("trainer.accelerator=gpu", "torch can use no GPU here", 1),
    Case("trainer.devices=[3]", "trainer: `devices` selected with `CPUAccelerator` should be an int", 1),
    Case("`calbacks+` in trainer", "Did you mean 'trainer.callbacks'?", 2,
         edit=lambda v: v["trainer"].update({"calbacks+": []})),
    Case("`LearningRateFinder`", "which the learning rate is not. Set model.optimizer's lr.", 1,
         edit=lambda v: v["trainer"]["callbacks"].append({"class_path": "LearningRateFinder"})),
    Case("`memory_limit` of 400 digits", "A number has more digits than a float holds", 2,
         edit=lambda v: model(v).update(rollout={"memory_limit": f"{10**400}"})),
    Case("a `default_root_dir` of 300 letters", "cannot be written: File name too long", 1,
         f"--trainer.default_root_dir={'a' * 300}"),
    Case("`ImportanceReweighting` with `clip_max: -1`", "clip_max must be above 0, or null, got clip_max=-1.0.", 1,
         "--trainer.callbacks+=ImportanceReweighting --trainer.callbacks.clip_max=-1"),
    Case("trainer.callbacks+=Foo", "There is no class 'Foo'. A class of your own is named with its module", 2),
    Case("checkpoints below a file", "ModelCheckpoint='config.yaml' cannot be written", 1,
         edit=lambda v: callback(v, 1)["init_args"].update(dirpath="config.yaml")),
    Case("`--ckpt_path=last` with another `dirpath` than before", "there is no last.ckpt in ['elsewhere']", 1,
         "--ckpt_path=last", edit=lambda v: callback(v, 1)["init_args"].update(dirpath="elsewhere")),
    Case("`--ckpt_path=last` with another policy than before", "this checkpoint is of another model: 0 unknown", 1,
         "--ckpt_path=last", edit=lambda v: model(v)["policy"]["init_args"].update(hidden_size=64)),
]  # fmt: skip

FILES = [
    Case(
        "a second `trainer:` block at the end of the file",
        "config.yaml: the key 'trainer' is given twice, in lines 30 and 51: the second would replace all of the first.",
        2, text=lambda text: text + "trainer:\n  max_steps: 1\n",
    ),
    Case(
        "a key twice in the `base`", "config.yaml: low.yaml: the key 'trainer' is given twice, in lines 1 and 2", 2,
        text=lambda text: f"base: low.yaml\n{text}",
        prepare=lambda folder: (folder / "low.yaml").write_text("trainer: {max_steps: 2}\ntrainer: {max_steps: 3}\n"),
    ),
    Case("tabs in place of spaces", "found character that cannot start any token", 2,
         text=lambda text: text.replace("\n  class_path", "\n\tclass_path", 1)),
    Case(
        "`!!python/object/apply:os.system`", "could not determine a constructor for the tag", 2,
        text=lambda text: text + "x: !!python/object/apply:os.system ['touch PWNED']\n",
    ),
    Case("an empty file", "Unexpected config", 2, text=lambda text: ""),
    Case("config=./config_.yaml", "Did you mean 'config.yaml'?", 2),
    Case("a model's options without `init_args`", "What belongs to a class stands below its init_args", 2,
         edit=lambda v: v["model"].update(v["model"].pop("init_args"))),
    Case("a compressor's options without `init_args`", "Give a class_path, and its options below init_args.", 2,
         edit=lambda v: model(v).update(compressor={"class_path": "RKV", "budget": 12})),
]  # fmt: skip

CLASSES = [
    Case(f"{RKV}=rkb", "There is no class 'rkb'. Did you mean 'RKV'?", 2),
    Case(f"{RKV}=os.system", "os.system does not correspond to a subclass of Compressor", 2),
    Case("model.optimizer=subprocess.Popen", "to be a subclass of &lt;class 'Optimizer'&gt;", 2),
    Case("model.reward_funcs=os.system", "does not fit the data: missing a required argument: 'command'", 1),
    Case("model.num_generatons=4", "Did you mean 'sampling.num_generations'", 2),
    Case("optimizer.lr=1e-4", "Did you mean 'model.optimizer.lr'?", 2),
    Case("model.loss=os.system", "os.system does not correspond to a subclass of Loss", 2),
    Case("model.loss.losstype=dapo", "Did you mean 'loss_type'?", 2),
]

CASES = [*NUMBERS, *TRAINER, *FILES, *CLASSES]

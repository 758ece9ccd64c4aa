"""Cases of configurations and command lines; a name without anything else is what the user types behind ``--``."""

from __future__ import annotations

from typing import Any

from cases.case import TRAINS, Case, replaced

NO_NUMBER = "Expected a &lt;class 'int'&gt;. Got value: None"
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
    Case("model.loss.beta=.inf", "loss.beta must be a finite number, at least 0, got beta=inf.", 1, slow=True),
    Case("model.loss.epsilon=.nan", "loss.epsilon must be a finite number, at least 0, got epsilon=nan.", 1),
    Case("model.loss.epsilon=-0.2", "loss.epsilon must be at least 0, got epsilon=-0.2.", 1),
    Case("model.loss.epsilon=2", "Set epsilon to at most 1, where 1 means no lower clip", 1, slow=True),
    Case(
        "model.sampling.temperature=.inf",
        "temperature must be a finite number, 0 (greedy) or more, got temperature=inf.",
        1,
    ),
    Case("model.sampling.temperature=.nan", "temperature must be a finite number, 0 (greedy) or more", 1, slow=True),
    Case("model.sampling.temperature=-1", "temperature must be a finite number, 0 (greedy) or more", 1, slow=True),
    Case(
        "model.sampling.temperature=1e-40",
        "temperature must be a finite number, 0 (greedy) or more (0, or of a size from 1.2e-38 to 3.4e+38: float32), "
        "got temperature=1e-40.",
        1,
    ),
    Case("model.sampling.temperature=0.001", slow=True),
    Case("model.sampling.top_p=.nan", "top_p must be in (0, 1], got top_p=nan.", 1, slow=True),
    Case("model.reward_weights=[.nan,1]", "reward_weights[0] must be a finite number, got reward_weights[0]=nan.", 1),
    Case("model.reward_weights=[1,.inf]", "reward_weights[1] must be a finite number", 1, slow=True),
    Case("model.reward_weights=[1e39,1]", "reward_weights[0] must be a finite number (0, or of a size", 1, slow=True),
    Case("model.reward_weights=[0,0]", slow=True),
    Case(
        "model.rollout.reward_timeout=.nan",
        "rollout.reward_timeout must be a finite number, above 0, or null, got reward_timeout=nan.",
        1,
    ),
    Case("model.sampling.seed=-1", slow=True),
    Case("model.sampling.seed=99999999999999999999", "seed must be a whole number of 64 bits, from -2**63", 1),
    Case("data.seed=99999999999999999999", "data.seed must be a whole number of 64 bits, from -2**63", 1),
    Case("seed_everything=99999999999999999999", "seed_everything must be at least 0 and at most 4294967295", 1),
    Case("model.sampling.num_generations=null", f'num_generations": {NO_NUMBER}', 2),
    Case("model.sampling.max_completion_length=null", f'max_completion_length": {NO_NUMBER}', 2, slow=True),
    Case(f"{RKV}.buffer=null", "buffer must be a number, got null. Leave the key out for the default", 2, slow=True),
    Case(
        "`buffer: null` below the compressor",
        "buffer must be a number, got null. Leave the key out for the default, 128.",
        2,
        edit=lambda v: compressor(v).update(buffer=None),
    ),
    Case("model.learner.head_chunk_size=null", "head_chunk_size\": Expected a &lt;class 'int'&gt;. Got value: None", 2),
    Case("trainer.max_steps=null", "Parser key \"trainer.max_steps\": Expected a &lt;class 'int'&gt;", 2, slow=True),
    Case("model.sampling.max_completion_length=-3", "max_completion_length must be at least 1", 1, slow=True),
    Case(
        "model.sampling.max_completion_length=5000",
        "leaves no room for a prompt in the model's context of 128",
        1,
    ),
    Case("model.sampling.num_generations=2.5", "Expected a &lt;class 'int'&gt;. Got value: 2.5", 2),
    Case("model.sampling.num_generations=2.0", "Expected a &lt;class 'int'&gt;. Got value: 2.0", 2, slow=True),
    Case("model.sampling.num_generations=true", "Expected a &lt;class 'int'&gt;. Got value: True", 2, slow=True),
    Case("a number in quotes, `num_generations: '2'`", edit=lambda v: model(v)["sampling"].update(num_generations="2")),
    Case(
        "model.sampling.num_generations=1",
        "num_generations must be at least 2, because a sample is judged against",
        1,
        slow=True,
    ),
    Case("model.steps_per_generation=3", "cannot be cut into steps_per_generation=3 equal micro-batches", 1, slow=True),
    Case(f"{RKV}.budget=0", "RKV: budget must be a positive number of tokens, got budget=0.", 1, slow=True),
    Case(f"{RKV}.budget=8", "budget=8 is smaller than num_sinks + window = 1 + 8 = 9 tokens", 1, slow=True),
    Case(f"{RKV}.budget=many", 'Parser key "budget"', 2, slow=True),
    Case(f"{RKV}.budget=100000", slow=True),
    Case("data.prompts_per_rollout=64", "16 prompts do not fill one block: 64 prompts per rollout", 1, slow=True),
    Case("model.sampling.stop_strings=['']", "stop_strings must be a list of texts that are not empty", 1, slow=True),
    Case(
        "model.rollout.end_tokens=['']", "rollout.end_tokens: [''] are not in the tokenizer's vocabulary", 1, slow=True
    ),
    Case(
        "model.rollout.end_tokens=['<|im_end|>']", "are not in the tokenizer's vocabulary. Remove or correct them.", 1
    ),
]

OPTIMIZER = [
    Case(
        "`optimizer: {class_path: torch.optim.AdamW, init_args: {lr: .nan}}`",
        "model.optimizer: Invalid learning rate: nan", 1,
        "--model.optimizer=torch.optim.AdamW --model.optimizer.lr=.nan",
    ),
    Case(
        "`optimizer: {class_path: torch.optim.SGD, init_args: {lr: .nan}}`",
        "model.optimizer.lr must be a finite number, at least 0, got lr=nan.", 1,
        "--model.optimizer=torch.optim.SGD --model.optimizer.lr=.nan", slow=True,
    ),
    Case(
        "`optimizer: {class_path: torch.optim.AdamW, init_args: {lr: .inf}}`",
        "model.optimizer.lr must be a finite number, at least 0, got lr=inf.", 1,
        "--model.optimizer=torch.optim.AdamW --model.optimizer.lr=.inf",
    ),
    Case(
        "`optimizer: {class_path: torch.optim.AdamW, init_args: {lr: -1}}`",
        "model.optimizer: Invalid learning rate: -1.0", 1,
        "--model.optimizer=torch.optim.AdamW --model.optimizer.lr=-1", slow=True,
    ),
    Case(
        "`optimizer: {class_path: torch.optim.AdamW, init_args: {lr: null}}`", "lr must be a number, got null", 2,
        "--model.optimizer=torch.optim.AdamW --model.optimizer.lr=null", slow=True,
    ),
    Case(
        "a learning rate in quotes, `lr: '1e-4'`", TRAINS, 0,
        "--model.optimizer=torch.optim.AdamW --model.optimizer.lr=1e-4", slow=True,
    ),
]  # fmt: skip

TRAINER = [
    Case("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches must be at least 1", 1),
    Case("trainer.accumulate_grad_batches=3", "not a multiple of accumulate_grad_batches=3", 1, slow=True),
    Case("trainer.gradient_clip_val=.nan", "trainer.gradient_clip_val must be a finite number", 1),
    Case("trainer.gradient_clip_val=0", slow=True),
    Case("trainer.gradient_clip_val=-1", slow=True),
    Case("trainer.max_steps=0", "`Trainer.fit` stopped: `max_steps=0` reached.", slow=True),
    Case("trainer.max_steps=-5", "`max_steps` must be a non-negative integer or -1 (infinite steps)", 1, slow=True),
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
    Case("num_threads=0", 'Parser key "num_threads"', 2, slow=True),
    Case("a `default_root_dir` of 300 letters", "cannot be written: File name too long", 1,
         f"--trainer.default_root_dir={'a' * 300}"),
    Case("trainer.default_root_dir=config.yaml/run", "trainer.default_root_dir='config.yaml/run' cannot be written", 1),
    Case("trainer.default_root_dir=/proc/x/y", "trainer.default_root_dir='/proc/x/y' cannot be written", 1, slow=True),
    Case("trainer.default_root_dir=''", slow=True),
    Case(
        "two `StepGuard` in `trainer.callbacks`",
        "trainer.callbacks: StepGuard is listed twice. One is enough, remove the other.", 1,
        "--trainer.callbacks+=StepGuard --trainer.callbacks+=StepGuard",
    ),
    Case(
        "two `RunSummary` in `trainer.callbacks`",
        "trainer.callbacks: RunSummary is listed twice. One is enough, remove the other.", 1,
        "--trainer.callbacks+=RunSummary --trainer.callbacks+=RunSummary", slow=True,
    ),
    Case(
        "`ImportanceReweighting` with `clip_max: -1`", "clip_max must be above 0, or null, got clip_max=-1.0.", 1,
        "--trainer.callbacks+=ImportanceReweighting --trainer.callbacks.clip_max=-1",
    ),
    Case(
        "`ImportanceReweighting` with `clip_max: 0`", "clip_max must be above 0, or null, got clip_max=0.0.", 1,
        "--trainer.callbacks+=ImportanceReweighting --trainer.callbacks.clip_max=0", slow=True,
    ),
    Case(
        "`TIS` with `clip_max: .nan`", "clip_max must be a finite number, above 0, or null, got clip_max=nan.", 1,
        "--trainer.callbacks+=TIS --trainer.callbacks.clip_max=.nan", slow=True,
    ),
    Case(
        "`SparsityAwareRejection` with `threshold: .nan`", "threshold must be between 0 and 1", 1,
        "--trainer.callbacks+=SparsityAwareRejection --trainer.callbacks.threshold=.nan", slow=True,
    ),
    Case("trainer.callbacks+=Foo", "There is no class 'Foo'. A class of your own is named with its module", 2),
    Case("a callback `RunSumary`", "Did you mean 'RunSummary'", 2, slow=True,
         edit=lambda v: callback(v, 0).update(class_path="RunSumary")),
    Case("checkpoints below a file", "ModelCheckpoint='config.yaml' cannot be written", 1,
         edit=lambda v: callback(v, 1)["init_args"].update(dirpath="config.yaml")),
    Case("a log below a file", "save_dir='config.yaml/log' cannot be written", 1, slow=True,
         edit=lambda v: v["trainer"]["logger"]["init_args"].update(save_dir="config.yaml/log")),
    Case("`--ckpt_path=last` with another `dirpath` than before", "there is no last.ckpt in ['elsewhere']", 1,
         "--ckpt_path=last", edit=lambda v: callback(v, 1)["init_args"].update(dirpath="elsewhere")),
    Case("`--ckpt_path=last` of `RolloutCheckpoint` in another `default_root_dir`",
         "there is no last.ckpt in ['other/checkpoints']", 1,
         "--ckpt_path=last --trainer.default_root_dir=other",
         edit=lambda v: v["trainer"]["callbacks"].__setitem__(1, {"class_path": "RolloutCheckpoint"})),
    Case("`--ckpt_path=last` with another policy than before", "this checkpoint is of another model: 0 unknown", 1,
         "--ckpt_path=last", edit=lambda v: model(v)["policy"]["init_args"].update(hidden_size=64)),
    Case("ckpt_path=nowhere.ckpt", "ckpt_path='nowhere.ckpt' does not exist", 1, slow=True),
]  # fmt: skip

FILES = [
    Case(
        "a second `trainer:` block at the end of the file",
        "config.yaml: the key 'trainer' is given twice, in lines 30 and 51: the second would replace all of the first.",
        2, text=lambda text: text + "trainer:\n  max_steps: 1\n",
    ),
    Case(
        "a key twice, deep inside", "the key 'budget' is given twice, in lines 13 and 14", 2,
        text=replaced(r"( +)budget: 12\n", "\\1budget: 12\n\\1budget: 14\n"),
    ),
    Case(
        "a key twice in a file in place of a class", "the key 'init_args' is given twice, in lines 2 and 3", 2,
        edit=lambda v: model(v).update(compressor="rkv.yaml"),
        prepare=lambda folder: (folder / "rkv.yaml").write_text(
            "class_path: RKV\ninit_args: {budget: 12, buffer: 4}\ninit_args: {budget: 13}\n"
        ),
    ),
    Case(
        "a `base` that is not there", "config.yaml: base: 'nowhere.yaml' cannot be read: No such file or directory.", 2,
        text=lambda text: f"base: nowhere.yaml\n{text}",
    ),
    Case(
        "a file that is its own `base`", "config.yaml: base: config.yaml -> config.yaml is a circle.", 2,
        text=lambda text: f"base: config.yaml\n{text}", slow=True,
    ),
    Case(
        "a `base` of another kind", "config.yaml: base must name a file or a list of files", 2,
        text=lambda text: f"base: {{file: other.yaml}}\n{text}", slow=True,
    ),
    Case(
        "a key twice in the `base`", "config.yaml: low.yaml: the key 'trainer' is given twice, in lines 1 and 2", 2,
        text=lambda text: f"base: low.yaml\n{text}",
        prepare=lambda folder: (folder / "low.yaml").write_text("trainer: {max_steps: 2}\ntrainer: {max_steps: 3}\n"),
    ),
    Case(
        "a class of the file in place of another of its `base`, whose options it does not take", slow=True,
        text=lambda text: f"base: low.yaml\n{text}",
        prepare=lambda folder: (folder / "low.yaml").write_text(
            "model: {init_args: {compressor: {class_path: SnapKV, init_args: {pooling: avg}}}}\n"
        ),
    ),
    Case("a section `bas` in place of `base`", "Did you mean 'base'", 2, slow=True,
         edit=lambda v: v.update(bas="low.yaml")),
    Case(
        "a key that a merge overrides, `{<<: *options, budget: 12}`", slow=True,
        text=replaced(r"budget: 12\n( +)", r"<<: {budget: 64}\n\1budget: 12\n\1"),
    ),
    Case("tabs in place of spaces", "found character that cannot start any token", 2,
         text=replaced(r"\n +class_path", "\n\tclass_path")),
    Case(
        "`!!python/object/apply:os.system`", "could not determine a constructor for the tag", 2,
        text=lambda text: text + "x: !!python/object/apply:os.system ['touch PWNED']\n",
    ),
    Case("an empty file", "Unexpected config", 2, text=lambda text: ""),
    Case("a list in place of keys", "Unexpected config: - a - b", 2, text=lambda text: "- a\n- b\n", slow=True),
    Case("a binary file", "Problems parsing config", 2, text=lambda text: "\x00\x01\x02", slow=True),
    Case("config=config.yaml", slow=True),
    Case("config=.", 'Parser key "config": Path is not a file', 2, slow=True),
    Case("config=nowhere.yaml", "nowhere.yaml", 2, slow=True),
    Case("config=./config_.yaml", "Did you mean 'config.yaml'?", 2),
    Case("a file in place of an option", "Did you mean --config other.yaml?", 2, "other.yaml", slow=True),
    Case("a model's options without `init_args`", "What belongs to a class stands below its init_args", 2,
         edit=lambda v: v["model"].update(v["model"].pop("init_args"))),
    Case("a compressor's options without `init_args`", "Give a class_path, and its options below init_args.", 2,
         edit=lambda v: model(v).update(compressor={"class_path": "RKV", "budget": 12})),
    Case("`max_steps` below `model`", "Did you mean 'trainer.max_steps'", 2, slow=True,
         edit=lambda v: v.update({"max_steps": 3})),
    Case("a section `modl`", "Did you mean 'model'?", 2, edit=lambda v: v.update(modl=3), slow=True),
]  # fmt: skip

CLASSES = [
    Case(f"{RKV}=SnapKVV", "There is no class 'SnapKVV'. Did you mean 'SnapKV'?", 2, slow=True),
    Case(f"{RKV}=rkb", "There is no class 'rkb'. Did you mean 'RKV'?", 2),
    Case(f"{RKV}=Zzyx", "A class of your own is named with its module, such as mine.Zzyx.", 2, slow=True),
    Case(f"{RKV}=nowhere_else.KNorm", "No module named 'nowhere_else'", 2, slow=True),
    Case(f"{RKV}=os.system", "os.system does not correspond to a subclass of Compressor", 2),
    Case(f"{RKV}=subprocess.Popen", "subprocess.Popen does not correspond to a subclass of Compressor", 2, slow=True),
    Case("model.optimizer=subprocess.Popen", "to be a subclass of &lt;class 'Optimizer'&gt;", 2),
    Case("trainer.callbacks+=subprocess.Popen", 'Parser key "trainer.callbacks"', 2, slow=True),
    Case("trainer.logger=subprocess.Popen", 'Parser key "trainer.logger"', 2, slow=True),
    Case("model.reward_funcs=subprocess.Popen", "expects a function or a callable class", 2, slow=True),
    Case("model.reward_funcs=os.system", "does not fit the data: missing a required argument: 'command'", 1),
    Case(
        "model.reward_funcs=[]", "reward_funcs is empty: at least one reward function is needed, or an environment.", 1
    ),
    Case("model.compressor=null", "the following arguments are required: compressor", 2, slow=True),
    Case("model.policy=null", "the following arguments are required: policy", 2, slow=True),
    Case("model.num_generatons=4", "Did you mean 'sampling.num_generations'", 2),
    Case("num_generations=4", "Did you mean 'model.sampling.num_generations'?", 2, slow=True),
    Case("optimizer.lr=1e-4", "Did you mean 'model.optimizer.lr'?", 2),
    Case("model.learning_rate=1e-4", "Did you mean 'model.optimizer.lr'?", 2, slow=True),
    Case(
        "`--trainer.logger=TensorBoardLogger` alone",
        "the following arguments are required: save_dir",
        2,
        "--trainer.logger=TensorBoardLogger",
        edit=lambda v: v["trainer"].pop("logger"),
        slow=True,
    ),
    Case("model.loss=mine.Loss", "model.loss=mine.Loss: a configuration sets options of GRPOLoss", 2),
    Case("model.loss.help", "lists the keys of a class and of its groups", 2, slow=True),
    Case("trainer.callbacks+=sparse_rl_lightning.callbacks.RunSumary", "Did you mean 'RunSummary'", 2, slow=True),
    Case(f"{RKV}.bugdet=4", "Did you mean 'budget'", 2, slow=True),
    Case("model.loss.loss_type=grppo", "'grpo', 'dapo', 'bnpo', 'dr_grpo', 'cispo'", 2, slow=True),
    Case("data.num_trian=4", "Did you mean 'num_train'", 2, slow=True),
]

TOPICS = {
    "Numbers": NUMBERS,
    "The optimizer": OPTIMIZER,
    "The trainer": TRAINER,
    "Files": FILES,
    "Classes and options": CLASSES,
}

"""The commands, and the options of those that have parsers of their own: light to import, so that ``--help`` is quick.

From the table come help, dispatch and the subcommands of the LightningCLI.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from sparse_rl_lightning.text import visible

ONE, SEVERAL = "report.html", "comparison.html"
"""Pages that ``sparse-rl report`` writes, of one run and of several."""


class Parser(argparse.ArgumentParser):
    """A parser that quotes nothing in its errors which could take over a terminal."""

    def error(self, message: str) -> NoReturn:
        """End with a usage error."""
        super().error(visible(message))


def benchmark() -> Parser:
    """Options of ``sparse-rl benchmark``."""
    command = Parser(
        prog="sparse-rl benchmark", allow_abbrev=False,
        description="Compressors side by side on one policy: tail of the acceptance, agreement, accuracy, cost and "
        "exactness of replay, beside random eviction that keeps the prompt and the full cache. Run it again to go on "
        "where it was stopped.",
    )  # fmt: skip
    add = command.add_argument
    add(
        "methods", nargs="+", metavar="METHOD", help="SnapKV, mine.Method, or a file.yaml with class_path and init_args"
    )
    add("--policy", required=True, metavar="FOLDER", help="Hugging Face folder or hub name")
    data = command.add_mutually_exclusive_group()
    data.add_argument("--data", metavar="FILE", help="JSONL with prompt, and answer if accuracy is to be measured")
    data.add_argument("--tasks", nargs="+", default=["sum"], metavar="TASK", help="of ArithmeticTasks, default sum")
    add(
        "--prompt_column",
        default="prompt",
        metavar="NAME",
        help="column of --data with the prompt, default %(default)s",
    )
    add("--answer_column", metavar="NAME", help="column with the answer, default answer where there is one")
    add("--answer_pattern", metavar="REGEX", help="finds the bare answer in its column; gsm8k is that of GSM8K")
    add("--prompt_template", metavar="TEXT", help="text around {prompt}, such as '{prompt} Answer in \\boxed{{}}.'")
    add("--as_chat", action="store_true", help="text prompts are messages of a user, rendered by the chat template")
    add("--temperature", type=float, default=1.0, help="of the draws, default %(default)s")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
        help="type of the weights, default the folder's; numbers of 16 bits have their rounding in them")  # fmt: skip
    add("--num_terms", type=int, help="numbers per question of --tasks, default 4")
    add("--reward", metavar="PATH", help="pays 1 for a right answer; default arithmetic_reward, or boxed_math_reward "
        "for rows without a task")  # fmt: skip
    add("--budgets", nargs="+", type=_budget, default=[0.25, 0.5, 0.75], metavar="BUDGET",
        help="tokens, or shares of the mean length with the full cache, default 0.25 0.5 0.75")  # fmt: skip
    add("--output", default="runs/benchmark", metavar="FOLDER", help="where the table is written, default %(default)s")
    add("--problems", type=int, default=128, help="number of problems, default %(default)s")
    add("--samples", type=int, default=1, help="completions per problem that the tail is of, default %(default)s")
    add("--timed", type=int, default=32, help="completions that both caches are timed on, default %(default)s; 0: none")
    add("--max_completion_length", type=int, help="tokens of a completion, default 64 for tasks and 512 for data")
    add("--num_slots", type=int, help="sequences drawn at once, default all: lower it where memory is short")
    add("--buffer", type=int, help="tokens between two compressions; default: a third of the least budget, at most 128")
    add("--num_sinks", type=int, help="first tokens that stay; default: an eighth of the least budget, at most 4")
    add("--window", type=int, help="last tokens that stay; default: a third of the least budget, at most 8")
    add("--protect_prompt", action="store_true", help="never evict the prompt, in all rows but those of files")
    add("--seed", type=int, default=0, help="seed of the problems and the draws")
    return command


def report() -> Parser:
    """Options of ``sparse-rl report``."""
    parser = Parser(
        prog="sparse-rl report",
        description="Write the page of a run, finished or not, or one page that compares several runs.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a run's trainer.default_root_dir")
    parser.add_argument("--output", metavar="FILE", help=f"default FOLDER/{ONE} of one run, {SEVERAL} of several")
    parser.add_argument("--overwrite", action="store_true", help="replace the file even if it is no such page")
    return parser


def import_gguf() -> Parser:
    """Options of ``sparse-rl import-gguf``."""
    parser = Parser(
        prog="sparse-rl import-gguf", allow_abbrev=False,
        description="Write the model, tokenizer and chat template of a GGUF file as a Hugging Face folder, with every "
        "weight whole, for the architectures that transformers reads.",
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE", help="GGUF file")
    parser.add_argument("folder", metavar="FOLDER", help="new folder")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"],
                      help="type of the weights in the folder, default %(default)s; float32 loses nothing")  # fmt: skip
    return parser


def doctor() -> Parser:
    """Options of ``sparse-rl doctor``: none but ``--help``."""
    words = "Say which kernels run here, on the CPU and on GPUs, what is missing, and what to do about it."
    return Parser(prog="sparse-rl doctor", allow_abbrev=False, description=words)


def plan(proposes: bool = True) -> Parser:
    """Options of ``sparse-rl plan``: of proposing a configuration, or of predicting one."""
    parser = Parser(
        prog="sparse-rl plan", allow_abbrev=False,
        usage="%(prog)s --config FILE [--card NAME] [--memory SIZE] [--prompt TOKENS] [overrides]\n       "
        "%(prog)s --model NAME --length TOKENS [--card NAME] [--memory SIZE] [--output FILE] [--overwrite]",
        description="Predict memory and time of a configuration per GPU, without loading weights (--config FILE), or "
        "write a configuration that fits (--model NAME --memory 24GB --length 16384 [--output FILE]).",
        epilog="With --config, --prompt is the longest prompt in tokens (default 256), and everything else "
        "overrides the configuration, as for `sparse-rl fit`.",
    )  # fmt: skip
    parser.add_argument("--card", metavar="NAME", help="such as rtx-4090-24gb, h100-80gb (the default), b200-180gb")
    parser.add_argument("--memory", metavar="SIZE", help="memory of the card, such as 24GB; default: the card's")
    if proposes:
        parser.add_argument("--model", required=True, metavar="NAME", help="hub name or folder, such as Qwen/Qwen3-4B")
        parser.add_argument("--length", required=True, type=int, help="tokens of the longest sequence, prompt included")
        parser.add_argument("--output", metavar="FILE", help="file to write, default NAME-MEMORY.yaml")
        parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
        return parser
    parser.add_argument("--prompt", metavar="TOKENS", type=int, default=256, help="longest prompt, default %(default)s")
    return parser


def record() -> Parser:
    """Options of ``sparse-rl record``."""
    parser = Parser(prog="sparse-rl record", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, dest="command")
    words = "replay a record, and say whether its log-probabilities are those of the replay"
    check = commands.add_parser("check", help=words, description=words, allow_abbrev=False)
    check.add_argument("file", metavar="FILE", help="record, a safetensors file (docs/from_verl.md)")
    check.add_argument("--model", required=True, metavar="FOLDER", help="weights that drew it, a Hugging Face folder")
    check.add_argument("--tolerance", type=float, default=1e-3, help="difference in nats that is rounding")
    check.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the replay")
    check.add_argument("--device", help="device of the replay, default the GPU where there is one")
    words = "say whether two records say the same, in whatever order and pieces"
    compare = commands.add_parser("compare", help=words, description=words, allow_abbrev=False)
    compare.add_argument("file", metavar="FILE")
    compare.add_argument("other", metavar="OTHER")
    return parser


def serve() -> Parser:
    """Options of ``sparse-rl serve``."""
    parser = Parser(
        prog="sparse-rl serve", allow_abbrev=False,
        description="Serve completions under a compressed KV cache to clients of OpenAI's and vLLM's routes.",
        epilog="Keys are read from SPARSE_RL_API_KEY and SPARSE_RL_UPDATE_KEY in the environment, or from files.",
    )  # fmt: skip
    add = parser.add_argument
    add("--policy", required=True, metavar="FOLDER", help="Hugging Face folder or hub name")
    add("--compressor", default="FullKV", metavar="METHOD",
        help="'{class_path: SnapKV, init_args: {budget: 512}}', a file.yaml of it, or a class")  # fmt: skip
    add("--num_slots", type=int, default=64, help="sequences drawn at once, default %(default)s")
    add("--memory_limit", type=float, help="of the slots: a share of the free memory up to 1, above that bytes")
    add("--max_length", type=int, help="tokens of a prompt and its completion, default the model's context")
    add("--max_logprobs", type=int, default=20, help="most likely tokens a request may ask for, default %(default)s")
    add("--max_prefill_tokens", type=int, default=2048, help="tokens of prompts between two steps, default %(default)s")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of the weights")
    add("--kv_dtype", metavar="TYPE", help="of stored keys and values, such as float8_e4m3fn")
    add("--device", help="default the GPU where there is one")
    add("--served_model_name", metavar="NAME", help="default the hub name, or the folder's own name")
    add("--host", default="127.0.0.1", help="address, default %(default)s; any other needs a key")
    add("--port", type=int, default=8000, help="default %(default)s; 0 takes a free one")
    add("--allowed_hosts", nargs="+", metavar="NAME", help="names that clients call the server by")
    add("--api_key_file", metavar="FILE", help="file with the key that clients must send")
    add("--allow_updates", action="store_true", help="let a trainer pause it; needs a key of its own")
    add("--update_key_file", metavar="FILE", help="file with that key")
    add("--trainer", metavar="HOST", help="host that may broadcast weights, by vLLM's transfer")
    add("--weights_from", metavar="FOLDER", help="folder below which a trainer's weights may be read")
    add("--max_lora_rank", type=int, help="let a trainer load LoRA adapters up to this rank, and no weights")
    add("--max_queue", type=int, default=1024, help="completions that run or wait, default %(default)s")
    add("--request_timeout", type=float, default=3600, metavar="SECONDS", help="of a request, default %(default)s")
    add("--shutdown_timeout", type=int, default=30, metavar="SECONDS", help="that requests may take to end on SIGTERM")
    return parser


def _budget(text: str) -> float:
    number = float(text)
    if not (0 < number < 1 or (number >= 1 and number.is_integer())):
        raise argparse.ArgumentTypeError(f"{text} is neither a number of tokens nor a share between 0 and 1")
    return number


@dataclass(frozen=True)
class Command:
    """A command of ``sparse-rl``; without a ``home`` it is a subcommand of the LightningCLI."""

    line: str  # what it does, for --help
    home: str | None = None  # module and function, which is called with the arguments that follow
    parser: Callable[[], argparse.ArgumentParser] | None = None  # answers --help without the home
    is_bare: bool = False  # runs before anything is imported that could fail, or would take seconds


COMMANDS = {
    "fit": Command("train a policy as a configuration says"),
    "validate": Command("compute a configuration's validation metrics once"),
    "test": Command("measure a policy on held-out problems"),
    "predict": Command("write a policy's completions to predictions.jsonl"),
    "export": Command("write the policy of a checkpoint as a folder that from_pretrained reads"),
    "calibrate": Command("find a schedule of budgets for a policy, or measure this machine", "calibrate:main"),
    "statistics": Command(
        "gather what QFilters, TriAttention and LearnedScore need to know of a policy", "calibrate:statistics_main"
    ),
    "report": Command("write the page of a run, or of several side by side", "report:main", report, True),
    "plan": Command("predict memory and time of a configuration, or write one for a card", "plan:main", plan),
    "benchmark": Command("measure compressors side by side on a policy", "benchmark:main", benchmark),
    "serve": Command("serve completions to clients of OpenAI's and vLLM's routes", "serve:main", serve),
    "record": Command("check whether an engine's evictions explain its log-probabilities", "record:main", record),
    "import-gguf": Command(
        "write a GGUF file, llama.cpp's format, as a folder that policies are read from",
        "training.import_gguf:main",
        import_gguf,
    ),
    "doctor": Command("say which kernels run here, and what is missing", "doctor:main", doctor, True),
}

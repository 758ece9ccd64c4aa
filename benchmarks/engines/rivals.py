"""Who takes part, by the names of the command, each with its environment and the policy in its form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks import REAL
from benchmarks.engines.contest import OWN, Engine
from benchmarks.engines.venvs import LLAMACPP, OPENVINO, VLLM, Environment, llamacpp_model, openvino_model

FULL, SPARSE = "own engine, full cache", "own engine, R-KV 128 + 32"
OPENVINO_FULL, OPENVINO_SPARSE = "OpenVINO GenAI", "OpenVINO GenAI, evicting to 160"
IN_PROCESS = {"own server, full cache": FULL, "own server, R-KV 128 + 32": SPARSE}
"""Own servers, and the same engine without one."""
VLLM_SERVED = "vLLM, served"
EVICTING = (SPARSE, OPENVINO_SPARSE)
FEW = 256
"""New tokens up to which slow rivals take part."""
ENVIRONMENTS: dict[str, Environment] = {"openvino": OPENVINO, "vllm": VLLM, "llamacpp": LLAMACPP}


def own_engines(policy: Path) -> dict[str, Engine]:
    """This library's, with both caches, in the process of who asks and behind HTTP."""
    engines = {FULL: Engine("ours.py", OWN, policy), SPARSE: Engine("ours.py", OWN, policy, evicts=True)}
    return engines | {
        served: Engine("served.py", OWN, policy, evicts=engines[name].evicts) for served, name in IN_PROCESS.items()
    }


def _transformers(policy: Path, _: Path) -> dict[str, Engine]:
    return {"transformers generate": Engine("transformers_generate.py", OWN, policy, most=FEW)}


def _openvino(policy: Path, work: Path) -> dict[str, Engine]:
    python, exported = OPENVINO.python(work), openvino_model(policy, work)
    return {
        OPENVINO_FULL: Engine("openvino_genai_paged.py", python, exported),
        OPENVINO_SPARSE: Engine("openvino_genai_paged.py", python, exported, evicts=True),
    }


def _vllm(policy: Path, work: Path) -> dict[str, Engine]:
    python = VLLM.python(work)
    return {"vLLM": Engine("vllm_cpu.py", python, policy), VLLM_SERVED: Engine("served.py", python, policy)}


def _llamacpp(policy: Path, work: Path) -> dict[str, Engine]:
    if policy != REAL:
        raise ValueError(f"its file is made of the policy of make real-model alone, not of {policy}")
    python = LLAMACPP.python(work)
    return {"llama.cpp": Engine("llamacpp_server.py", python, llamacpp_model(work), only="bfloat16", most=FEW)}


RIVALS: dict[str, Callable[[Path, Path], dict[str, Engine]]] = {
    "transformers": _transformers, "openvino": _openvino, "vllm": _vllm, "llamacpp": _llamacpp,
}  # fmt: skip
"""From the policy and the folder of environments to engines; CalledProcessError or ValueError where one cannot be."""

"""A server of its own, this library's or vLLM's, asked over HTTP for all prompts at once: ids and log-probs of each."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from serve import Generate, Settings, serve
from vllm_cpu import set_environment


def ours(settings: Settings) -> list[str]:
    """R-KV evicts to budget and buffer; a slot for every sequence."""
    sizes = f"budget: {settings['budget']}, buffer: {settings['buffer']}"
    compressor = f"{{class_path: RKV, init_args: {{{sizes}}}}}" if settings["evicts"] else "FullKV"
    program = (
        f"import sys, torch; torch.set_num_threads({settings['threads']}); "
        "from sparse_rl_lightning.cli.serve import main; main(sys.argv[1:])"
    )
    return [
        "-c", program, f"--policy={settings['policy']}", f"--dtype={settings['dtype']}", f"--compressor={compressor}",
        f"--num_slots={settings['sequences']}", f"--max_length={settings['longest']}", "--served_model_name=policy",
        "--max_logprobs=0",
    ]  # fmt: skip


def vllm(settings: Settings) -> list[str]:
    """As in vllm_cpu.py."""
    set_environment(settings)
    return [
        "-m", "vllm.entrypoints.openai.api_server", f"--model={settings['policy']}", f"--dtype={settings['dtype']}",
        f"--max-model-len={settings['longest']}", f"--max-num-seqs={settings['sequences']}",
        "--served-model-name=policy", "--no-enable-prefix-caching",
    ]  # fmt: skip


def load(settings: Settings) -> Generate:
    """Whichever of the two is installed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = vllm(settings) if "vllm" in sys.executable else ours(settings)
    server = subprocess.Popen([sys.executable, *command, f"--port={port}"])
    client, pool = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None), ThreadPoolExecutor(64)
    while True:
        try:
            client.get("/health").raise_for_status()
            break
        except httpx.HTTPError:
            if server.poll() is not None:
                raise RuntimeError("The server has ended.") from None
            time.sleep(0.5)

    def generate(prompts: list[list[int]], new_tokens: int) -> list[int]:
        def drawn(prompt: list[int]) -> int:
            body = {
                "model": "policy", "prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, "temperature": 1.0,
                "logprobs": 0, "return_token_ids": True,
            }  # fmt: skip
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
            return len(answer["choices"][0]["token_ids"])

        return list(pool.map(drawn, prompts))

    return generate


if __name__ == "__main__":
    serve(load)

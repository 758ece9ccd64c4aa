"""TRL's GRPOTrainer in server mode, in a process of its own: the server at a URL draws, and gets its weights.

python -m tests.serve.trl_trainer URL POLICY FOLDER PORT '{"max_steps": 3}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.serve.stub_vllm import install

install()

from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402

url, policy, folder, port, changes = sys.argv[1:6]
join = VLLMClient.init_communicator
# TRL asks for a CUDA device before anything else, and the group is gloo's here
VLLMClient.init_communicator = lambda self, device=0: join(self, "cuda")


def likes_digits(completions: list[str], **_: Any) -> list[float | None]:
    return [sum(map(str.isdigit, text)) / 12 for text in completions]


trainer = GRPOTrainer(
    model=policy, reward_funcs=likes_digits, train_dataset=Dataset.from_dict({"prompt": [*"123456789"]}),
    args=GRPOConfig(
        folder, use_vllm=True, vllm_mode="server", vllm_server_base_url=url, vllm_group_port=int(port),
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=8, num_generations=4, save_strategy="no", learning_rate=3e-2, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0.0, **json.loads(changes),
    ),
)  # fmt: skip
trainer.train()
print(json.dumps(trainer.state.log_history))

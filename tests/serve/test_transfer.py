"""Weights that a trainer broadcasts: whole and fitting, or nothing is written, whatever becomes of the trainer."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from sparse_rl_lightning.policies import updates
from sparse_rl_lightning.serve import transfer
from sparse_rl_lightning.serve.bodies import BadRequest
from tests.serve.stub_vllm import Endpoint, free_port, packed_nccl_broadcast_producer
from tests.serve.test_control import Asking, drawn, order, other
from tests.serve.test_server import Running, built, folder, json_values

ROOT = Path(__file__).parents[2]

__all__ = ["folder", "other"]  # of the other files


@pytest.fixture
def running(folder: Path) -> Iterator[Running]:
    running = Running(built(folder, "--allow_updates", "--trainer", "127.0.0.1", update_key="trainer"))
    yield running
    running.close()


def info(port: int, **changes: Any) -> dict[str, Any]:
    return {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, **changes}


def joined(running: Running, port: int) -> Endpoint:
    """The trainer's end of a group with the server."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(order, running, "/init_weight_transfer_engine", init_info=info(port))
        endpoint = Endpoint(port, 2)
        assert answer.result().json() == {"status": "ok"}
    return endpoint


def described(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    types = [str(weight.dtype).removeprefix("torch.") for weight in weights.values()]
    return {"names": list(weights), "dtype_names": types, "shapes": [list(w.shape) for w in weights.values()]}


def sent(running: Running, endpoint: Endpoint, weights: dict[str, torch.Tensor]) -> Any:
    """The answer to a part of an update."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(order, running, "/update_weights", update_info=described(weights))
        packed_nccl_broadcast_producer(iter(weights.items()), endpoint, 0, lambda item: item[1])
        return answer.result()


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in AutoModelForCausalLM.from_pretrained(path).named_parameters()}


@pytest.mark.parametrize("piece", [transfer.PIECE_BYTES, 5000, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_comes_in_requests_and_pieces(
    running: Running, folder: Path, other: Path, piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", piece)
    monkeypatch.setattr("tests.serve.stub_vllm.PIECE_BYTES", piece)
    endpoint, new = joined(running, free_port()), weights_of(other / "step_1")
    new = {name: weight.to(dtype) for name, weight in new.items()}
    odd = torch.zeros(3, 5, dtype=torch.bfloat16)  # after which nothing begins where a float32 may
    order(running, "/start_weight_update")
    first, *others = new
    assert sent(running, endpoint, {first: new[first]}).json() == {"status": "ok"}
    assert Asking(running).choice["token_ids"] == drawn(folder, max_completion_length=70)  # of the old ones
    assert sent(running, endpoint, {name: new[name] for name in others}).json() == {"status": "ok"}
    answer = running.http.post("/finish_weight_update", headers={"authorization": "Basic dHJsOnRyYWluZXI="})  # no body
    assert answer.json() == {"status": "ok", "weight_version": "1"}
    held = running.server.thread.sampler.model.state_dict()
    for name, weight in new.items():
        assert torch.equal(held[name], weight.to(held[name].dtype))
    order(running, "/start_weight_update")
    assert sent(running, endpoint, {"odd": odd, **new}).status_code == 400  # all of it has been taken from the trainer
    order(running, "/start_weight_update")
    assert sent(running, endpoint, new).json() == {"status": "ok"}
    assert order(running, "/finish_weight_update", weight_version="v9").json()["weight_version"] == "v9"


@pytest.mark.parametrize("wrong", ["name", "shape", "nan", "missing", "unbegun"])
def test_nothing_is_written_of_an_update_that_is_wrong(running: Running, folder: Path, other: Path, wrong: str) -> None:
    endpoint, new = joined(running, free_port()), weights_of(other / "step_1")
    norm = "model.norm.weight"
    if wrong == "name":
        new["model.norm.bias"] = new.pop(norm)
    elif wrong == "shape":
        new[norm] = new[norm][:-1]
    elif wrong == "nan":
        new[norm][3] = torch.nan
    elif wrong == "missing":
        del new[norm]
    if wrong != "unbegun":
        order(running, "/start_weight_update")
    first, last = sent(running, endpoint, new), order(running, "/finish_weight_update")
    assert first.status_code == (200 if wrong in ("missing", "nan") else 400)  # which are known at the end
    assert last.status_code == 400
    assert "Traceback" not in first.text + last.text
    assert Asking(running).choice["token_ids"] == drawn(folder, max_completion_length=70)
    order(running, "/start_weight_update")
    assert sent(running, endpoint, weights_of(other / "step_1")).status_code == 200
    assert order(running, "/finish_weight_update").status_code == 200


def test_a_trainer_that_is_killed_leaves_a_server_that_answers(running: Running, folder: Path, other: Path) -> None:
    port, new = free_port(), weights_of(other / "step_1")
    program = (
        f"from tests.serve.stub_vllm import Endpoint\nend = Endpoint({port}, 2)\nprint('joined', flush=True)\ninput()"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert order(running, "/init_weight_transfer_engine", init_info=info(port)).status_code == 200
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "joined\n"
    order(running, "/start_weight_update")
    with ThreadPoolExecutor(1) as pool:
        update: Future[Any] = pool.submit(order, running, "/update_weights", update_info=described(new))
        assert Asking(running).choice["token_ids"] == drawn(folder, max_completion_length=70)  # while it waits
        trainer.kill()
        assert update.result().status_code == 400
    assert "begun" in order(running, "/finish_weight_update").json()["error"]["message"]
    assert Asking(running).choice["token_ids"] == drawn(folder, max_completion_length=70)
    endpoint = joined(running, free_port())  # of the trainer that goes on
    order(running, "/start_weight_update")
    sent(running, endpoint, new)
    order(running, "/finish_weight_update")
    assert Asking(running).choice["token_ids"] == drawn(other / "step_1", max_completion_length=70)


def test_an_update_that_does_not_go_on_is_given_up(
    running: Running, folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, new = joined(running, free_port()), weights_of(other / "step_1")
    order(running, "/start_weight_update")
    monkeypatch.setattr(updates, "UPDATE_SECONDS", 0.2)
    assert sent(running, endpoint, new).status_code == 200
    running.until(lambda: running.server.control.updates._new is None)
    assert "given up" in order(running, "/finish_weight_update").json()["error"]["message"]
    assert Asking(running).choice["token_ids"] == drawn(folder, max_completion_length=70)


def test_an_update_that_goes_on_is_not_given_up(
    running: Running, folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to be received."""
    endpoint, new = joined(running, free_port()), weights_of(other / "step_1")
    monkeypatch.setattr(updates, "UPDATE_SECONDS", 1.0)
    order(running, "/start_weight_update")
    receive = transfer.GlooGroup.receive
    monkeypatch.setattr(transfer, "PIECE_BYTES", 20_000)
    monkeypatch.setattr("tests.serve.stub_vllm.PIECE_BYTES", 20_000)
    monkeypatch.setattr(transfer.GlooGroup, "receive", lambda *args: (time.sleep(0.3), receive(*args)))
    started = time.monotonic()
    assert sent(running, endpoint, new).json() == {"status": "ok"}
    assert time.monotonic() - started > 1.0
    assert order(running, "/finish_weight_update").status_code == 200
    assert Asking(running).choice["token_ids"] == drawn(other / "step_1", max_completion_length=70)


def test_a_folder_between_its_requests_does_not_end_an_update(folder: Path, other: Path) -> None:
    options = ("--allow_updates", "--trainer", "127.0.0.1", "--weights_from", str(other))
    running = Running(built(folder, *options, update_key="trainer"))
    endpoint = joined(running, free_port())
    order(running, "/start_weight_update")
    assert sent(running, endpoint, weights_of(folder)).status_code == 200
    for name, status in (("nowhere", 400), ("step_1", 200)):
        assert order(running, "/update_weights", weight_dir=name).status_code == status
    assert Asking(running).choice["token_ids"] == drawn(other / "step_1", max_completion_length=70)
    assert order(running, "/finish_weight_update").status_code == 200
    assert Asking(running).choice["token_ids"] == drawn(folder, max_completion_length=70)
    running.close()


def test_a_trainer_that_does_not_listen_holds_up_nothing(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "JOIN_SECONDS", 2.0)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(order, running, "/init_weight_transfer_engine", init_info=info(free_port()))
        assert order(running, "/pause").status_code == 200
        assert order(running, "/resume").status_code == 200
        assert not late.done()
        assert late.result().status_code == 400


@pytest.mark.parametrize("asleep", [False, True])
def test_a_sleeping_or_paused_server_takes_weights(running: Running, other: Path, asleep: bool) -> None:
    endpoint = joined(running, free_port())
    order(running, "/sleep" if asleep else "/pause?mode=keep")
    order(running, "/start_weight_update")
    assert sent(running, endpoint, weights_of(other / "step_1")).status_code == 200
    assert order(running, "/finish_weight_update").status_code == 200
    order(running, "/wake_up" if asleep else "/resume")
    assert Asking(running).choice["token_ids"] == drawn(other / "step_1", max_completion_length=70)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/init_weight_transfer_engine", {}, "init_info must be an object"),
        ("/init_weight_transfer_engine", {"init_info": info(80, master_address="169.254.169.254")}, "--trainer"),
        ("/init_weight_transfer_engine", {"init_info": info(0)}, "master_port"),
        ("/init_weight_transfer_engine", {"init_info": info(80, world_size=9)}, "world_size 2"),
        ("/init_weight_transfer_engine", {"init_info": info(80, packed=False)}, "packed"),
        ("/update_weights", {"update_info": []}, "update_info must be an object"),
        ("/finish_weight_update", {"weight_version": True}, "weight_version must be"),
        ("/finish_weight_update", {"weight_version": "v" * 129}, "at most 128"),
        ("/update_weight_version", {"weight_version": [1]}, "weight_version must be"),
        ("/update_weight_version", {}, "missing"),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": [], "shapes": [[1]]}}, "one each"),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["load"], "shapes": [[1]]}}, "bfloat16"),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": [["x"]], "shapes": [[1]]}}, "one each"),
        (
            "/update_weights",
            {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1]]}},
            "one each",
        ),
        (
            "/update_weights",
            {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1 << 31]]}},
            "more than",
        ),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}}, "joined"),
    ],
)
def test_what_is_wrong_is_refused(running: Running, path: str, body: dict[str, Any], says: str) -> None:
    answer = order(running, path, **body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


FIELDS = ("init_info", "update_info", "weight_dir", "weight_version", "lora_name", "lora_path", "names", "shapes")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), body=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
def test_whatever_a_trainer_sends_the_server_lives(running: Running, data: st.DataObject, body: dict[str, Any]) -> None:
    path = data.draw(
        st.sampled_from([route.path for route in running.server.control.routes if "POST" in route.methods])
    )
    answer = order(running, path, **body)
    assert answer.status_code in (200, 400), answer.text
    assert "Traceback" not in answer.text
    if path in ("/sleep", "/pause"):
        order(running, "/wake_up" if path == "/sleep" else "/resume")


def test_nobody_is_joined_unless_the_server_was_told_whom(folder: Path) -> None:
    running = Running(built(folder, "--allow_updates", update_key="trainer"))
    assert "--trainer" in order(running, "/init_weight_transfer_engine", init_info=info(80)).json()["error"]["message"]
    information = running.http.get("/server_info", headers={"authorization": "Bearer trainer"}).json()
    assert information["vllm_config"]["weight_transfer_config"] is None
    running.close()


class ncclUniqueId(ctypes.Structure):  # as vLLM's
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("it was executed",)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_an_identity_is_read_without_unpickling(protocol: int) -> None:
    identity = bytes(range(1, 129))
    made = ncclUniqueId.from_buffer_copy(identity)
    assert transfer.nccl_id(pickle.dumps(made, protocol)) == identity
    for content in (pickle.dumps(Harmful()), pickle.dumps((made, bytes(128))), b"", b"\x80\x05junk", b"x" * 200):
        with pytest.raises(BadRequest):
            transfer.nccl_id(content)

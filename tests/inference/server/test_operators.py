"""What operators do while clients are served: new weights, pause and resume, figures."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference import LLM, SamplingParams

LONG = {"prompt": "1+2=", "max_tokens": 100, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def other_weights(chat_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("other")
    torch.manual_seed(7)
    tensors = load_file(Path(chat_folder, "model.safetensors"))
    save_file({name: t + 0.05 * torch.randn_like(t) for name, t in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def test_weights_change_under_load(start: Any, chat_folder: str, other_weights: str) -> None:
    """Requests that run keep what they have and go on under the new weights; a new one is that of a cold engine."""
    running = start(api_key="secret", engine={"max_num_seqs": 8})
    folders = [other_weights, chat_folder] * 4
    answers: list[dict[str, Any]] = []
    done = threading.Event()

    def load(seed: int) -> None:
        while not done.is_set():
            answers.append(running.complete(**LONG, n=2, seed=seed))

    clients = [threading.Thread(target=load, args=(seed,)) for seed in range(3)]
    for client in clients:
        client.start()
    for version, folder in enumerate(folders, 1):
        seen = running.engine.stats()["output_tokens"]
        running.wait_for(lambda seen=seen: running.engine.stats()["output_tokens"] > seen + 20)
        reply = running.post(
            "/update_weights", path=folder, version=version, kv="recompute" if version % 3 == 0 else "keep"
        )
        assert reply.status_code == 200 and reply.json()["version"] == version, reply.text
    done.set()
    for client in clients:
        client.join()
    spans = [choice["version_spans"] for answer in answers for choice in answer["choices"]]
    assert {choice["finish_reason"] for answer in answers for choice in answer["choices"]} == {"length"}
    for one in spans:
        assert [start for _, start, _ in one] == [0, *(end for *_, end in one[:-1])] and one[-1][2] == 100
        assert [version for version, *_ in one] == sorted({version for version, *_ in one})
    assert running.client.get("/version").json() == {"version": 8}
    [expected] = LLM(chat_folder, block_size=4).generate(["1+2="], SamplingParams(temperature=0, max_tokens=20))
    fresh = running.complete(temperature=0, max_tokens=20, return_token_ids=True)["choices"][0]
    assert fresh["token_ids"] == expected.samples[0].token_ids
    assert fresh["version_spans"] == [[8, 0, len(fresh["token_ids"])]]
    running.assert_idle()


def test_a_running_request_goes_on_under_new_weights(
    start: Any, other_weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(api_key="secret")
    gate = running.gate_steps(monkeypatch, 10)
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(running.complete(**LONG)))
    client.start()
    gate.wait()
    operator = threading.Thread(
        target=lambda: answers.append(running.post("/update_weights", path=other_weights, version=4))
    )
    operator.start()
    running.wait_for_command()
    gate.open()
    operator.join()
    client.join()
    reply, answer = sorted(answers, key=lambda one: isinstance(one, dict))
    assert reply.json()["version"] == 4 and reply.json()["stall_seconds"] > 0
    assert answer["choices"][0]["version_spans"] == [[0, 0, 11], [4, 11, 100]]


def test_an_update_that_cannot_be_is_refused_and_changes_nothing(
    running: Any, tmp_path: Path, other_weights: str
) -> None:
    before = running.complete(temperature=0, max_tokens=20)["choices"]
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    for body, says in (
        ({"path": str(tmp_path), "version": 1}, "nothing was changed"),
        ({"path": "/nowhere", "version": 1}, "no folder"),
        ({"path": "a\0b", "version": 1}, "no folder"),
        ({"path": "a" * 300, "version": 1}, "no folder"),
        ({"path": other_weights, "version": 0}, "does not follow"),
        ({"path": other_weights, "version": "1"}, "version"),
        ({"path": other_weights, "version": 1, "kv": "drop"}, "kv"),
        ({"path": other_weights, "version": 1, "force": True}, "force"),
        ({"version": 1}, "path"),
    ):
        reply = running.post("/update_weights", **body)
        assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text
    assert running.client.get("/version").json() == {"version": 0}
    assert running.complete(temperature=0, max_tokens=20)["choices"] == before


def test_pause_holds_and_resume_lets_go(running: Any) -> None:
    assert running.client.post("/pause").json() == {"paused": True}
    steps = running.engine.stats()["steps"]
    answers: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: answers.append(running.complete(max_tokens=5, ignore_eos=True)))
    client.start()
    running.wait_for(lambda: running.engine.requests)
    assert running.client.get("/health").status_code == 200
    assert running.engine.stats()["steps"] == steps
    assert running.client.post("/resume").json() == {"paused": False}
    client.join()
    assert answers[0]["usage"]["completion_tokens"] == 5


def test_metrics_say_what_happened(running: Any) -> None:
    def read() -> dict[str, float]:
        lines = running.client.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    before = read()
    running.complete(max_tokens=5, n=3, ignore_eos=True)
    running.post("/v1/completions", prompt="1", n=0)
    after = read()

    def grown(name: str, labels: str = "") -> float:
        key = f'{name}{{{labels}model_name="tiny"}}' if "{" not in name else name
        return after[key] - before.get(key, 0)

    assert grown("vllm:generation_tokens_total") == 15
    assert grown("vllm:prompt_tokens_total") == 4
    assert grown("vllm:request_success_total", 'finished_reason="length",') == 3
    assert grown("vllm:e2e_request_latency_seconds_count") == 1
    assert grown("vllm:time_to_first_token_seconds_count") == 3
    assert grown('olmorl:requests_refused_total{model_name="tiny",status="400"}') == 1
    assert after['vllm:num_requests_running{model_name="tiny"}'] == 0
    assert after['vllm:kv_cache_usage_perc{model_name="tiny"}'] == 0

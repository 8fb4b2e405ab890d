"""Whatever a hostile or clumsy client sends is answered with an error that says what is wrong, and never with a 500."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "1"}
ANSWERS = {200, 400, 401, 404, 405, 413, 422, 429}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": {}}, 400, "prompt"),
        ({"prompt": [[1], "1"]}, 400, "prompt"),
        ({"prompt": [1, "1"]}, 400, "prompt"),
        ({"prompt": [1.5]}, 400, "prompt"),
        ({"prompt": [True]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [22]}, 400, None),
        ({"prompt": [2**40]}, 400, "prompt"),
        ({"prompt": ""}, 400, None),
        ({"prompt": [[]]}, 400, None),
        ({"prompt": "1" * 128}, 400, "prompt"),
        ({"prompt": "1" * 100_000}, 400, "messages"),
        ({"prompt": "1", "n": 0}, 400, "n"),
        ({"prompt": "1", "n": 10**9}, 400, "n"),
        ({"prompt": "1", "n": 10**30}, 400, "n"),
        ({"prompt": "1", "n": "2"}, 400, "n"),
        ({"prompt": "1", "n": True}, 400, "n"),
        ({"prompt": ["1"] * 65}, 400, "n"),
        ({"prompt": "1", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "1", "max_tokens": -5}, 400, "max_tokens"),
        ({"prompt": "1", "max_tokens": 1.5}, 400, "max_tokens"),
        ({"prompt": "1", "min_tokens": 20}, 400, "min_tokens"),
        ({"prompt": "1", "temperature": -0.1}, 400, "temperature"),
        ({"prompt": "1", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "1", "top_p": 0}, 400, "top_p"),
        ({"prompt": "1", "top_p": 1.1}, 400, "top_p"),
        ({"prompt": "1", "top_k": -2}, 400, "top_k"),
        ({"prompt": "1", "repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"prompt": "1", "stop": ""}, 400, "stop"),
        ({"prompt": "1", "stop": [1]}, 400, "stop"),
        ({"prompt": "1", "stop": ["a"] * 33}, 400, "stop"),
        ({"prompt": "1", "stop": "a" * 1025}, 400, "stop"),
        ({"prompt": "1", "stop_token_ids": [22]}, 400, None),
        ({"prompt": "1", "logprobs": 21}, 400, "logprobs"),
        ({"prompt": "1", "logprobs": -1}, 400, "logprobs"),
        ({"prompt": "1", "logprobs_mode": "cooked"}, 400, "logprobs_mode"),
        ({"prompt": "1", "seed": 1.5}, 400, "seed"),
        ({"prompt": "1", "seed": 2**64}, 400, "seed"),
        ({"prompt": "1", "stream": "yes"}, 400, "stream"),
        ({"prompt": "1", "stream_options": 3}, 400, "stream_options"),
        ({"prompt": "1", "timeout": 0}, 400, "timeout"),
        ({"prompt": "1", "model": 5}, 400, "model"),
        ({"prompt": "1", "model": "gpt-4"}, 404, "model"),
        ({"prompt": "1", "echo": True}, 422, "echo"),
        ({"prompt": "1", "best_of": 4}, 422, "best_of"),
        ({"prompt": "1", "logit_bias": {"3": 1}}, 422, "logit_bias"),
    ],
)
def test_completion_bodies(running: Any, body: dict[str, Any], status: int, param: str | None) -> None:
    response = running.post(COMPLETIONS, **body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"messages": []}, 400),
        ({"messages": "hi"}, 400),
        ({"messages": [3]}, 400),
        ({"messages": [{}]}, 400),
        ({"messages": [{"role": "user"}]}, 400),
        ({"messages": [{"role": 3, "content": "1"}]}, 400),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 422),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, 400),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, 400),
        *(
            ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": a}}]}]}, 400)
            for a in ("[" * 900 + "]" * 900, '"\\ud800"')
        ),
        ({"messages": [USER], "top_logprobs": 2}, 400),
        ({"messages": [USER], "top_logprobs": 21, "logprobs": True}, 400),
        ({"messages": [USER], "logprobs": 1}, 400),
        ({"messages": [USER], "tools": "f"}, 400),
        ({"messages": [USER], "tool_choice": "required"}, 422),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, 422),
        ({"messages": [USER], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 422),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, 422),
        ({"messages": [{"role": "user", "content": "1" * 200}]}, 400),
    ],
)
def test_chat_bodies(running: Any, body: dict[str, Any], status: int) -> None:
    response = running.post(CHAT, **body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


def test_no_messages_are_called_that(running: Any) -> None:
    error = running.post(CHAT, messages=[]).json()["error"]
    assert (error["message"], error["param"]) == ("messages is empty", "messages")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"prompt"',
        b'{"prompt": "1", "temperature": NaN}',
        b'{"prompt": "1", "temperature": Infinity}',
        b'{"prompt": "1", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "1", "seed": ' + b"9" * 10_000 + b"}",
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bodies_that_are_no_json(running: Any, path: str, content: bytes) -> None:
    response = running.client.post(path, content=content)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_what_is_merely_unknown_is_ignored_and_said(running: Any) -> None:
    plain = running.complete(max_tokens=4, temperature=0)
    assert "warnings" not in plain
    asked = {"user": "me", "metadata": {}, "store": None, "suffix": None, "best_of": 1, "wibble": 3, "max_tokens": 4}
    answer = running.complete(**asked, temperature=0)
    assert answer["warnings"] == ["unknown field 'wibble' is ignored"]
    assert answer["choices"][0]["text"] == plain["choices"][0]["text"]


def test_extreme_values_are_served_or_refused(running: Any) -> None:
    for extreme in (1e-320, 1e-30, 1e30, 1e308):
        for name in ("temperature", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            response = running.post(COMPLETIONS, prompt="1", max_tokens=3, **{name: extreme})
            assert response.status_code in (200, 400), response.text
    assert running.complete(max_tokens=2**62)["usage"]["total_tokens"] <= 128


def test_routes(running: Any, start: Callable[..., Any]) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("POST", "/update_weights", 400),
    ):
        response = running.client.request(method, path)
        assert response.status_code == status and response.json()["error"]["message"], (method, path, response.text)
    assert "POST" in running.client.get(COMPLETIONS).headers["allow"]
    for path in ("/v1/models", "/metrics", "/version", "/pause"):
        assert running.client.get(path, headers={"authorization": "Bearer secretx"}).status_code == 401
        assert running.client.get(path, headers={"authorization": ""}).status_code == 401
    assert running.client.get("/health", headers={"authorization": ""}).status_code == 200
    for path in ("/pause", "/resume", "/update_weights"):
        assert start().client.post(path).status_code == 401, "closed without a key"


def test_size_limit(start: Callable[..., Any]) -> None:
    running = start(max_body_bytes=1000)
    assert running.post(COMPLETIONS, prompt="1" * 1000).status_code == 413
    chunks = iter([b'{"prompt": "', b"1" * 2000, b'"}'])  # without a length
    assert running.client.post(COMPLETIONS, content=chunks).status_code == 413
    assert running.complete(max_tokens=1)


# What the fuzzer knows of the protocol, so that it gets past the first check.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 9)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["1", "12", "tiny", "user", "assistant", "auto", "raw", "text"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "function", "name", "arguments"]), inner)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *("prompt", "messages", "model", "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop"),
        *("frequency_penalty", "presence_penalty", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "seed"),
        *("stream", "stream_options", "logprobs", "top_logprobs", "logprobs_mode", "return_token_ids", "timeout"),
        *("tools", "tool_choice", "chat_template_kwargs", "max_completion_tokens", "echo", "best_of", "logit_bias"),
    ]
)
GOOD = {COMPLETIONS: {"prompt": "1+", "max_tokens": 2}, CHAT: {"messages": [USER], "max_tokens": 2}}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([COMPLETIONS, CHAT]),
    changes=st.dictionaries(FIELDS, VALUES, max_size=4),
    cut=st.integers(0, 9),
)
def test_any_body_gets_an_answer(running: Any, path: str, changes: dict[str, Any], cut: int) -> None:
    body = json.dumps(GOOD[path] | changes).encode()
    content = body[: len(body) // 2] if cut == 0 else body
    response = running.client.post(path, content=content)
    assert response.status_code in ANSWERS, response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_any_bytes_leave_the_server_well(running: Any, content: bytes) -> None:
    with running.connect() as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        reply = connection.recv(1 << 16)
    assert b" 500 " not in reply[:20]
    assert running.client.get("/health").status_code == 200


@pytest.mark.parametrize("part", [b"y" * 65_536, b"x: y\r\n" * 8192])
def test_a_head_without_end_is_cut_off(running: Any, part: bytes) -> None:
    with running.connect() as connection, pytest.raises(OSError):
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        for _ in range(1000):  # nobody could hold that much for it
            connection.sendall(part)
    assert running.client.get("/health").status_code == 200

"""The real client of OpenAI's API against the server: what it gets is what the engine gives in process."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from inference import LLM, SamplingParams

PROMPT = "1+2="


@pytest.fixture(scope="module")
def llm(chat_folder: str) -> LLM:
    return LLM(chat_folder, max_num_seqs=4, kv_cache_tokens=1024, block_size=4)


@pytest.fixture(scope="module")
def client(running: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="secret", max_retries=0) as one:
        yield one


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("prompt", [PROMPT, [1, 10, 2, 11]])
def test_greedy_completion_is_that_of_generate(client: openai.OpenAI, llm: LLM, prompt: str | list[int]) -> None:
    [expected] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20))
    answer = client.completions.create(
        model="tiny", prompt=prompt, temperature=0, max_tokens=20, logprobs=3, extra_body={"return_token_ids": True}
    )
    [choice], [sample] = answer.choices, expected.samples
    assert choice.text == sample.text and choice.finish_reason == sample.finish_reason
    assert choice.token_ids == sample.token_ids  # type: ignore[attr-defined]
    assert choice.prompt_token_ids == expected.prompt_token_ids  # type: ignore[attr-defined]
    assert choice.version_spans == [[0, 0, len(sample.token_ids)]]  # type: ignore[attr-defined]
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(sample.raw_logprobs, abs=1e-5)
    assert "".join(choice.logprobs.tokens or []).removesuffix("<eos>") == choice.text
    assert [len(top) for top in choice.logprobs.top_logprobs or []] == [3] * len(sample.token_ids)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == len(sample.token_ids)


def test_samples_of_a_seed(client: openai.OpenAI, llm: LLM) -> None:
    [expected] = llm.generate([PROMPT], SamplingParams(n=3, seed=5, max_tokens=12, temperature=1.3, top_k=7))
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, n=3, seed=5, max_tokens=12, temperature=1.3, extra_body={"top_k": 7}
    )
    assert [choice.text for choice in answer.choices] == [sample.text for sample in expected.samples]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3


def test_several_prompts(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["1+", "2-3", "abc"]
    expected = llm.generate(prompts, SamplingParams(n=2, seed=1, max_tokens=6))
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, seed=1, max_tokens=6)
    assert [choice.text for choice in answer.choices] == [s.text for out in expected for s in out.samples]


def test_logprobs_of_the_distribution_drawn_from(client: openai.OpenAI, llm: LLM) -> None:
    """Raw by default, also the likeliest ones; what was never to be drawn has no infinite logprob in JSON."""
    params = {"temperature": 0.5, "seed": 3, "max_tokens": 6, "logprobs": 4}
    [expected] = llm.generate([PROMPT], SamplingParams(temperature=0.5, top_k=2, seed=3, max_tokens=6))
    sample = expected.samples[0]
    raw = client.completions.create(model="tiny", prompt=PROMPT, **params, extra_body={"top_k": 2})  # type: ignore[call-overload]
    processed = client.completions.create(  # type: ignore[call-overload]
        model="tiny", prompt=PROMPT, **params, extra_body={"top_k": 2, "logprobs_mode": "processed"}
    )
    assert raw.choices[0].logprobs.token_logprobs == pytest.approx(sample.raw_logprobs, abs=1e-5)
    assert processed.choices[0].logprobs.token_logprobs == pytest.approx(sample.logprobs, abs=1e-5)
    for one, ranks in ((raw, 4), (processed, 2)):
        logprobs = one.choices[0].logprobs
        for token, x, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
            assert top[token] == pytest.approx(x, abs=1e-5)
            assert sum(value > -9999 for value in top.values()) == ranks


def test_stop_strings(client: openai.OpenAI, llm: LLM) -> None:
    plain = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=20).choices[0].text
    stop = plain[5:7]
    for stops in (stop, ["zz", stop]):
        choice = client.completions.create(
            model="tiny", prompt=PROMPT, temperature=0, max_tokens=20, stop=stops
        ).choices[0]
        assert (choice.text, choice.finish_reason) == (plain[: plain.index(stop)], "stop")


@pytest.mark.parametrize("stop", [None, "2", ["77", "d8+"], "never to be found"])
def test_a_stream_says_what_the_whole_says(client: openai.OpenAI, stop: Any) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "n": 3, "seed": 2, "max_tokens": 30, "logprobs": 1}
    ask |= {"temperature": 1.2, "stop": stop, "extra_body": {"return_token_ids": True}}
    whole = client.completions.create(**ask)
    texts, ids, tokens, offsets, reasons = ({i: [] for i in range(3)} for _ in range(5))  # type: ignore[var-annotated]
    usage = None
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **ask):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index].append(choice.text)
            ids[choice.index] += choice.token_ids
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
            reasons[choice.index].append(choice.finish_reason)
    assert usage == whole.usage
    for choice in whole.choices:
        i = choice.index
        assert "".join(texts[i]) == choice.text and ids[i] == choice.token_ids
        assert (tokens[i], offsets[i]) == (choice.logprobs.tokens, choice.logprobs.text_offset)
        assert reasons[i][-1] == choice.finish_reason and set(reasons[i][:-1]) <= {None}


def test_chat(client: openai.OpenAI, llm: LLM) -> None:
    [expected] = llm.generate(["a12-b"], SamplingParams(temperature=0, max_tokens=10))
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "12"}]}],
        temperature=0,
        max_completion_tokens=10,
        logprobs=True,
        top_logprobs=2,
    )
    choice, sample = answer.choices[0], expected.samples[0]
    assert choice.message.role == "assistant" and choice.message.content == sample.text
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [x.logprob for x in choice.logprobs.content] == pytest.approx(sample.raw_logprobs, abs=1e-5)
    assert all(x.top_logprobs[0].token == x.token for x in choice.logprobs.content), "greedy takes the likeliest"


def test_chat_streams(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "7"}], "n": 2, "seed": 9}
    ask |= {"max_tokens": 16, "logprobs": True}
    whole = client.chat.completions.create(**ask)
    content, logprobs, roles = {0: "", 1: ""}, {0: [], 1: []}, []  # type: ignore[var-annotated]
    for chunk in client.chat.completions.create(stream=True, **ask):
        for choice in chunk.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            content[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert roles == ["assistant"] * 2
    for choice in whole.choices:
        assert content[choice.index] == choice.message.content
        assert logprobs[choice.index] == choice.logprobs.content


def test_tools_reach_the_template(client: openai.OpenAI, running: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages = [{"role": "user", "content": "1"}]
    asked = {"messages": messages, "tools": [tool], "max_tokens": 1, "return_token_ids": True}
    with_tools = running.post("/v1/chat/completions", **asked).json()["choices"][0]
    without = running.post("/v1/chat/completions", **asked, tool_choice="none").json()["choices"][0]
    assert with_tools["prompt_token_ids"][1:] == without["prompt_token_ids"]


def test_the_example_of_the_guide(running: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "inference.md").read_text()
    [example] = re.findall(r"```python\n(from openai .*?)```", page, re.DOTALL)
    for written, here in (("http://127.0.0.1:8000", running.url), ("KEY", "secret"), ("MODEL", "tiny")):
        assert written in example
        example = example.replace(written, here)
    played: dict[str, Any] = {}
    exec(example, played)
    answer = played["answer"]
    assert 0 < answer.usage.completion_tokens <= 64
    said = f"{answer.choices[0].message.content} {answer.usage.completion_tokens} None\n"
    assert capsys.readouterr().out == said


SAYS_TOOLS_ARE_HIDDEN = "tools: this model's chat template does not show them to the model"


@pytest.mark.parametrize(
    ("template", "hidden"),
    [
        ("{{ 'c' if tools }}{{ messages[0].content }}", False),
        ("{{ messages[0].content }}", True),
        ("{{ tools[0].function.name and 'c' }}{{ messages[0].content }}", False),
    ],
)
def test_tools_that_the_template_hides_are_told(start: Callable[..., Any], template: str, hidden: bool) -> None:
    """The last template cannot be rendered without tools."""
    running = start()
    running.server._completions._tokenizer._loaded.chat_template = template
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    answer = running.chat("1", tools=[tool], max_tokens=1)
    assert answer.get("warnings", []) == ([SAYS_TOOLS_ARE_HIDDEN] if hidden else [])
    lines = running.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "1"}], tools=[tool], max_tokens=1, stream=True
    ).text
    assert (SAYS_TOOLS_ARE_HIDDEN in lines) == hidden


def test_a_context_that_ends_before_max_tokens_is_told(running: Any) -> None:
    """128 tokens: of the prompts the longest leaves least."""
    warned = running.complete(["1", "1+2="], max_tokens=125, ignore_eos=True)
    assert warned["warnings"] == ["max_tokens = 125 is cut: a prompt of 4 tokens leaves 124 of this server's 128"]
    assert warned["usage"]["completion_tokens"] == 125 + 124
    assert "warnings" not in running.complete(["1", "1+2="], max_tokens=124)
    assert "warnings" not in running.chat("1"), "nothing was asked for"
    [chat] = running.chat("1", max_completion_tokens=500)["warnings"]
    assert chat.startswith("max_tokens = 500 is cut: a prompt of 4 tokens")


def test_errors_are_those_the_client_knows(client: openai.OpenAI, running: Any, start: Callable[..., Any]) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="huge", prompt="1")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="1", temperature=-1)
    assert bad.value.param == "temperature" and ">= 0" in bad.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="1" * 128)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.UnprocessableEntityError):
        client.completions.create(model="tiny", prompt="1", logit_bias={"1": 5})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong", max_retries=0).models.list()
    small = start(max_samples=2)
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0) as other:
        small.server.generations.thread.pause()
        waiting = other.completions.create(model="tiny", prompt="1", n=2, stream=True)
        small.wait_for(lambda: small.server.generations.num_held == 2)
        with pytest.raises(openai.RateLimitError) as full:
            other.completions.create(model="tiny", prompt="1")
        assert full.value.code == "queue_full"
        small.server.generations.thread.resume()
        assert sum(len(chunk.choices) for chunk in waiting) > 0
    small.assert_idle()

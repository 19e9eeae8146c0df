"""A judge behind an HTTP endpoint: what it is asked, how it is read, and how it may fail."""

import base64
import json
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.rewards import RewardSpec, describe, score
from flowalign.rewards.vlm import TEMPLATES, VLM
from flowalign.system import http
from flowalign.system.images import to_uint8


class Judge:
    """Plays OpenAI's chat completions; `reply(request)` -> text, or (status, body)."""

    def __init__(self, reply: Callable[[dict[str, Any]], Any], number: int):
        self.reply, self.lock, self.url = reply, threading.Lock(), f"http://judge{number}/v1"
        self.requests: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.busy = self.most = 0

    def handle(self, asked: httpx.Request) -> httpx.Response:
        request = json.loads(asked.content)
        with self.lock:
            self.requests.append(request | {"path": asked.url.path})
            self.headers.append(asked.headers)
            self.busy += 1
            self.most = max(self.most, self.busy)
        reply = self.reply(request)
        with self.lock:
            self.busy -= 1
        status, body = reply if isinstance(reply, tuple) else (200, answer(reply))
        return httpx.Response(status, stream=httpx.ByteStream(body))  # not read yet


def answer(text: Any, finish_reason: str = "stop") -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"message": message, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]}).encode()


def asked(request: dict[str, Any]) -> tuple[str, np.ndarray]:
    """The text and the pixels [H,W,3] of a request."""
    picture, text = request["messages"][0]["content"]
    kind, _, data = picture["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    image = Image.open(BytesIO(base64.b64decode(data)))
    return text["text"], np.asarray(image)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Judge]:
    """Makes judges that this test's HTTP reaches; retries wait for hundredths of a second."""
    judges: dict[str, Judge] = {}

    def start(reply: Callable[[dict[str, Any]], Any]) -> Judge:
        judge = Judge(reply, len(judges))
        judges[f"judge{len(judges)}"] = judge
        return judge

    monkeypatch.setattr(http, "LONGEST_WAIT", 0.01)
    monkeypatch.setattr(
        httpx.HTTPTransport, "handle_request", lambda _, asked: judges[asked.url.host].handle(asked)
    )
    return start


def images(count: int, size: int = 8) -> torch.Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def prompts(count: int) -> list[str]:
    return [f"picture {i}" for i in range(count)]


def test_the_request_holds_the_template_the_prompt_and_exactly_the_pixels(serve):
    judge = serve(lambda request: "Final Score: 4")
    picture = images(1)
    reward = VLM(judge.url + "/", "judge-7b", image_size=8, max_tokens=77)
    scores = reward(picture, ['a {cat} "hi"'], [{}])
    (request,) = judge.requests
    text, pixels = asked(request)
    assert request["path"] == "/v1/chat/completions" and request["model"] == "judge-7b"
    assert (request["temperature"], request["max_tokens"]) == (0, 77)
    assert text.endswith('Text Caption: [a {cat} "hi"]') and "'Final Score:'" in text
    assert np.array_equal(pixels, to_uint8(picture[0]))
    assert scores.value.tolist() == [pytest.approx(0.8)] and scores.parts["raw"].tolist() == [4]
    assert "Authorization" not in judge.headers[0]


def test_images_are_resized_as_the_peers_do_or_left_alone(serve):
    judge = serve(lambda request: "Final Score: 1")
    picture = images(1, 10)[:, :, :6]
    for size in (512, None):
        VLM(judge.url, "m", image_size=size)(picture, ["x"], [{}])
    seen = [asked(request)[1] for request in judge.requests]
    assert [pixels.shape for pixels in seen] == [(512, 512, 3), (6, 10, 3)]
    peers = Image.fromarray(to_uint8(picture[0])).resize((512, 512))  # flow_grpo/rewards.py
    assert np.array_equal(seen[0], np.asarray(peers))


def test_scores_are_read_off_answers_and_no_score_is_no_answer():
    for template, said, raw in (
        ("unifiedreward", "Final Score: 3.5", 3.5),
        ("unifiedreward", "cat (animal): 1\n**Final Score:** 2", 2),
        ("unifiedreward", "The wall says 'Final Score: 5'. Final Score: 1.", 1),
        ("unifiedreward", "Final Score: 10", None),
        ("unifiedreward", "Final Score: 0", None),
        ("unifiedreward", "I would say 4 out of 5", None),
        ("unifiedreward", "", None),
        ("unifiedreward", "Final Score: 3/10", None),
        ("unifiedreward", "Final Score: 4.5 / 10", None),
        ("unifiedreward", "Final Score: **3** out of 10", None),
        ("unifiedreward", "Final Score: 4/5", 4),
        ("unifiedreward", "Final Score: 4 out of 5.", 4),
        ("unifiedreward", "Final Score: 4,5", 4.5),
        ("unifiedreward", "Final Score: 4,500", None),
        ("unifiedreward", "Final Score: 80%", None),
        ("unifiedreward", "Final Score: 3\n(a Final Score: 1-5, or Final Score: 1 to 5)", 3),
        ("unifiedreward", '```json\n{"Final Score": 4}\n```', 4),
        ("unifiedreward", "**Final Score**: **[4]**", 4),
        ("unifiedreward", "Final Score: 4.", 4),
        ("unifiedreward", "Final Score: 4, since the colours are right", 4),
        ("qwenvl", "<QualityScore>5</QualityScore><OverallScore>2</OverallScore>", 2),
        ("qwenvl_strict", "<Thought>so</Thought>\n<OverallScore> 3 </OverallScore>", 3),
        ("qwenvl_quality", "<Score>5</Score>", 5),
        ("qwenvl", "<OverallScore>3.5</OverallScore>", None),
        ("qwenvl", "<QualityScore>5</QualityScore> and then it broke", None),
        ("qwenvl", "<OverallScore>6</OverallScore>", None),
    ):
        with pytest.raises(ValueError, match="score") if raw is None else nullcontext():
            assert TEMPLATES[template].read(said) == raw, said


def test_an_answer_without_a_score_is_invalid_and_its_beginning_the_reason(serve):
    replies = {"picture 0": "Final Score: 5", "picture 1": "I cannot judge\nthis " + "x" * 500}

    def reply(request):
        text, _ = asked(request)
        return next((said for key, said in replies.items() if key in text), None)

    scores = VLM(serve(reply).url, "m", image_size=None)(images(3), prompts(3), [{}] * 3)
    assert scores.valid.tolist() == [True, False, False]
    assert scores.value[0] == 1 and scores.value[1:].isnan().all()
    assert scores.parts["raw"][1:].isnan().all()
    assert "'I cannot judge this xxx" in scores.reasons[1] and len(scores.reasons[1]) < 250
    assert "choices[0].message.content" in scores.reasons[2]


@pytest.mark.parametrize(
    ("content", "finish_reason", "raw"),
    [
        ("<think>Final Score: 2, but", "length", None),
        ("Final Score: 4.", "length", None),
        ("<think>Final Score: 2, but", "stop", None),
        ("<think>Final Score: 1?</think>\nfour of five", "stop", None),
        ("<think>Final Score: 1?</think>\nFinal Score: 4", "stop", 4),
        ("Final Score: 1?</think>Final Score: 4", "stop", 4),  # the chat template opened it
        ("<think>a</think>Final Score: 4<think>Final Score: 2", "stop", None),
        ("[THINK]Final Score: 1[/THINK]Final Score: 3", "stop", 3),
        ("◁think▷Final Score: 1◁/think▷Final Score: 3", "stop", 3),
        ([{"type": "text", "text": "Final "}, {"type": "text", "text": "Score: 4"}], "stop", 4),
        ([{"type": "thinking"}, {"type": "text", "text": "Final Score: 4"}], "stop", 4),
        ([{"type": "text"}], "stop", None),
    ],
)  # fmt: skip
def test_only_the_verdict_of_a_complete_answer_counts(serve, content, finish_reason, raw):
    judge = serve(lambda request: (200, answer(content, finish_reason)))
    scores = VLM(judge.url, "m", image_size=None)(images(1), ["a dog"], [{}])
    assert scores.valid.tolist() == [raw is not None], scores.reasons
    if raw is not None:
        assert scores.parts["raw"].tolist() == [raw]
    assert (finish_reason != "length") or "max_tokens" in scores.reasons[0]


def test_an_own_text_is_asked_and_read_by_its_pattern(serve):
    judge = serve(lambda request: "points=7.5")
    text = "How good is an image of {prompt}, as JSON {points}?"
    own = VLM(judge.url, "m", text, pattern=r"points=(\d+\.\d)", scale=10)
    scores = own(images(1), ["a dog"], [{}])
    assert asked(judge.requests[0])[0] == "How good is an image of a dog, as JSON {points}?"
    assert scores.value.tolist() == [0.75] and scores.parts["raw"].tolist() == [7.5]


def test_concurrency_is_used_and_never_exceeded_and_order_is_kept(serve):
    three = threading.Barrier(3, timeout=20)

    def reply(request):
        number = int(asked(request)[0].rpartition("picture ")[2][:-1])
        three.wait()  # nobody answers before three are asked
        time.sleep(0.02 * (number % 3 == 0))  # the first of them answers last
        return f"Final Score: {1 + number % 5}"

    judge = serve(reply)
    scores = VLM(judge.url, "m", image_size=None, concurrency=3)(images(12), prompts(12), [{}] * 12)
    assert scores.parts["raw"].tolist() == [1 + i % 5 for i in range(12)]
    assert judge.most == 3 and len(judge.requests) == 12


def test_the_key_goes_in_the_header_and_into_no_message(serve, monkeypatch):
    monkeypatch.setenv("FLOWALIGN_JUDGE_KEY", "s3cret-key")
    judge = serve(lambda request: (401, b"wrong key s3cret-key"))
    reward = VLM(judge.url, "m", image_size=None, token_env="FLOWALIGN_JUDGE_KEY")
    scores = score(reward, images(1), ["a"], [{}])
    assert judge.headers[0]["Authorization"] == "Bearer s3cret-key"
    assert "401: wrong key ***" in scores.reasons[0] and len(judge.requests) == 1
    assert "s3cret" not in repr(scores) + repr(describe(reward)) + repr(vars(reward))


def test_wrong_options_are_refused_without_a_network(monkeypatch):
    monkeypatch.setattr("flowalign.rewards.vlm.Client", None)
    text = {"template": "Rate {prompt}"}
    for options, key in (
        ({"url": "localhost:8000"}, "`url`"),
        ({"url": "http://me:pw@host"}, "token_env"),
        ({"template": "qwenv"}, "'qwenvl'"),
        (text, "`pattern`"),
        ({**text, "pattern": "Score"}, "`pattern`"),
        ({**text, "pattern": "(1)", "scale": 0}, "`scale`"),
        ({"scale": 10}, "`scale`"),
    ):
        with pytest.raises(ValueError) as caught:
            RewardSpec("vlm", {"url": "http://127.0.0.1:9/v1", "model": "m", **options}).check()
        assert key in str(caught.value), options

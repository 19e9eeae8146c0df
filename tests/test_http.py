"""One client, one retry policy: what is tried again, when, and what nobody may read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from flowalign.system import http
from flowalign.system.http import Client

Serve = Callable[..., list[httpx.Request]]


class Clock(threading.Event):
    """Waits for nothing, and remembers for how long it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        return self.is_set()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Answers the next requests in turn, the last one for ever; returns the requests."""

    def start(*answers: int | httpx.Response | Exception) -> list[httpx.Request]:
        requests: list[httpx.Request] = []

        def handle(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
            requests.append(request)
            answer = answers[min(len(requests), len(answers)) - 1]
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, int):
                answer = httpx.Response(answer)
            body = httpx.ByteStream(answer.content)  # not read yet, as from a network
            return httpx.Response(answer.status_code, headers=answer.headers, stream=body)

        monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle)
        return requests

    yield start


def client(**options) -> tuple[Client, Clock]:
    made, clock = Client(**{"timeout": 5.0, **options}), Clock()
    made.stopped = clock
    return made, clock


def test_what_may_pass_is_tried_again_and_what_may_not_is_not(serve: Serve):
    broken = httpx.ConnectError("x"), httpx.RemoteProtocolError("x")
    kinds: list[tuple[int, type[Exception], tuple[int | Exception, ...]]] = [
        (4, TimeoutError, (408, 504, httpx.ReadTimeout("x"))),
        (4, ConnectionError, (429, 500, *broken)),
        (1, ConnectionError, (401, 403, 404)),
        (1, ValueError, (302, 400, 422)),
    ]
    for times, kind, answer in ((t, k, answer) for t, k, answers in kinds for answer in answers):
        requests = serve(answer)
        with client(retries=3)[0] as made, pytest.raises(kind) as caught:
            made.request("GET", "http://host/x")
        assert len(requests) == times, answer
        assert isinstance(answer, Exception) or str(answer) in str(caught.value)
        assert type(caught.value) is kind, answer


def test_waits_double_with_jitter_and_obey_the_server_up_to_a_limit(serve: Serve):
    made, clock = client(retries=9, backoff=0.5)
    serve(*[503] * 9, 200)
    made.request("GET", "http://host/x")
    assert len(clock.waits) == 9
    for number, wait in enumerate(clock.waits):
        seconds = min(0.5 * 2**number, http.LONGEST_WAIT)
        assert 0.75 * seconds <= wait <= 1.25 * seconds, number
    assert len({wait / 2**number for number, wait in enumerate(clock.waits)}) > 1
    for header, least, most in (("7", 7, 7), ("99999", 60, 60), ("Wed, 21 Oct", 0, 1)):
        made, clock = client()
        serve(httpx.Response(429, headers={"retry-after": header}), 200)
        made.request("GET", "http://host/x")
        assert least <= clock.waits[0] <= most, header


def test_another_server_is_asked_at_once_and_the_one_that_failed_last(serve: Serve, caplog):
    made, clock = client()
    requests = serve(503, 503, 503, 200)
    urls = ["http://a/x", "http://b/x"]
    made.request("GET", *urls)
    assert [str(request.url) for request in requests] == urls * 2
    assert clock.waits[0] == 0 and 0.3 < clock.waits[1] < 0.7 and 0.7 < clock.waits[2] < 1.3
    made.request("GET", "http://a/x", "http://c/x")
    assert str(requests[-1].url) == "http://c/x"
    warned = [record.getMessage().split()[0] for record in caplog.records]
    assert warned == urls  # of each once


def test_no_attempt_begins_after_the_deadline(serve: Serve):
    requests = serve(503)
    made, _ = client(deadline=0.2, backoff=0.3)
    with pytest.raises(ConnectionError, match="503"):
        made.request("GET", "http://host/x")
    assert len(requests) == 1


def test_the_token_goes_to_its_host_only_and_into_no_message(serve: Serve):
    body = b'{"error": {"message": "wrong key s3cret ' + b"x" * 280 + b' s3cret"}}'
    requests = serve(httpx.Response(400, content=body))
    with pytest.raises(ValueError, match=r"wrong key \*\*\*") as caught:
        client(token="s3cret")[0].request("GET", "http://host/x")
    assert requests[0].headers["authorization"] == "Bearer s3cret"
    assert "s3c" not in str(caught.value) and len(str(caught.value)) < 400
    requests = serve(httpx.Response(302, headers={"location": "http://other/y"}), 200)
    client(token="s3cret", redirects=True)[0].request("GET", "http://host/x")
    assert str(requests[1].url) == "http://other/y" and "authorization" not in requests[1].headers


def test_calls_of_a_dead_service_end_and_a_faulty_item_costs_itself_alone():
    def call(item: int) -> int:
        if item < 0:
            raise ConnectionError("gone")
        if item == 0:
            raise ValueError("zero")
        return item

    made = client()[0].map(call, [1, 0, -1, 2, -1, -1, 3, 4], concurrency=2)
    kinds = [r if isinstance(r, int) else type(r).__name__ for r in made]
    lost = "ConnectionError"
    assert kinds[:3] == [1, "ValueError", lost] and kinds[3] == 2
    assert client()[0].map(call, [], concurrency=2) == []
    with pytest.raises(ConnectionError, match="gone"):
        client()[0].map(call, [0, -1, -1], concurrency=1)
    results = client()[0].map(call, [1, -1, 2, 3], concurrency=1)
    assert [type(result) for result in results] == [int, *[ConnectionError] * 3]
    assert [str(result) for result in results[2:]] == ["not asked any more: gone"] * 2
    late = client(deadline=0.0)[0]
    with pytest.raises(ConnectionError, match="the time for all requests is over"):
        late.map(call, [1, 2, 3], concurrency=2)
    assert str(late.last) == "the time for all requests is over"

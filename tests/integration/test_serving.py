"""`hotrow serve`: requests get the scores of the scorer, hostile ones an error each, and versions come meanwhile."""

import http.client
import json
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import yaml

import hotrow
from forked import COMMAND, resident_bytes, start_forked
from hotrow.cli import app as cli

fastapi = pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

from fastapi.testclient import TestClient  # noqa: E402

from hotrow.serve import server  # noqa: E402  # not without these two
from hotrow.serve.server import MAX_BYTES, MAX_CELLS, MAX_ROWS, MAX_SHARED, MAX_WAITING, make_app  # noqa: E402

SCHEMA: dict[str, Any] = {
    "label": "click",
    "categorical": ["item", {"column": "user", "type": "int"}],
    "dense": [{"column": "price", "transform": "log1p_clip0"}],
    "split": {"kind": "random"},
}
OPTIONS: dict[str, Any] = {
    "batch_size": 64, "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1, "refit": False, "epochs": 2,
}  # fmt: skip
USER = {"user": 7, "price": 2.5}
ITEMS = [{"item": "i1"}, {"item": "i39"}, {"item": "never"}]


def rows(num_rows: int, seed: int = 0) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    item = rng.integers(0, 40, num_rows)
    return {
        "click": (rng.random(num_rows) < np.where(item % 3 == 0, 0.7, 0.1)).astype(int).tolist(),
        "item": [f"i{value}" for value in item],
        "user": rng.integers(1, 50, num_rows).tolist(),
        "price": rng.lognormal(1, 1, num_rows).tolist(),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export."""
    path = tmp_path_factory.mktemp("serving")
    told = {"schema": SCHEMA, "run": path / "run", "quiet": True}
    hotrow.fit(pa.table(rows(1500)), **told, **OPTIONS).export(path / "out")
    return path


class Client:
    """Sends requests to a server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Returns status and content."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body)
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if path != "/metrics" else text
        finally:
            connection.close()


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[Client, hotrow.Scorer]]:
    scorer = hotrow.Scorer(folder / "out")
    with serving(scorer) as client:
        yield client, scorer


@contextmanager
def serving(scorer: hotrow.Scorer, **options: Any) -> Iterator[Client]:
    """A server inside the block."""
    own, run = list[tuple[Any, int]](), uvicorn.Server.run

    def running(process: Any, sockets: list[socket.socket]) -> None:
        own.append((process, sockets[0].getsockname()[1]))
        run(process, sockets)

    options = {"host": "127.0.0.1", "port": 0, **options}
    thread = threading.Thread(target=server.serve, args=(scorer,), kwargs=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "run", running)
        thread.start()
        while not own or not own[0][0].started:
            time.sleep(0.01)
    try:
        yield Client(own[0][1])
    finally:
        own[0][0].should_exit = True
        thread.join()


def figures(text: str) -> dict[str, float]:
    """The numbers of /metrics."""
    return {key: float(n) for key, n in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}


def test_requests_get_the_scores_of_the_scorer(served: tuple[Client, hotrow.Scorer]) -> None:
    ask, scorer = served
    expected = scorer.score(user=USER, items=ITEMS)
    for body in ({"user": USER, "items": ITEMS}, {"rows": [{**USER, **item} for item in ITEMS]}):
        code, found = ask("POST", "/score", body)
        assert (code, found["version"]) == (200, scorer.version)
        np.testing.assert_array_equal(np.array(found["scores"], np.float32), expected)
    assert ask("POST", "/score", {"rows": []}) == (200, {"scores": [], "version": scorer.version})
    code, found = ask("POST", "/score", {"user": USER, "items": ITEMS, "strict": True})
    assert code == 400 and "'item', row 2" in found["error"]
    code, found = ask("GET", "/health")
    assert (code, found["version"]) == (200, scorer.version) and {*found["columns"]} == {"item", "user", "price"}
    code, text = ask("GET", "/metrics")
    counts = figures(text)
    assert counts['hotrow_requests_total{code="200"}'] == 3 and counts['hotrow_requests_total{code="400"}'] == 1
    assert counts['hotrow_cells_total{column="item",kind="unknown"}'] == 3
    assert counts["hotrow_rows_total"] == 6 and counts['hotrow_request_seconds{quantile="0.99"}'] > 0
    assert ask("GET", "/nowhere")[0] == ask("GET", "/score")[0] == 404


def test_others_are_answered_while_metrics_are_gathered(
    served: tuple[Client, hotrow.Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, _ = served
    gathering, others, late = threading.Event(), threading.Event(), list[bool]()

    def text(self: Any, scorer: hotrow.Scorer) -> str:
        gathering.set()
        late.append(not others.wait(30))
        return ""

    monkeypatch.setattr(server.Meter, "text", text)
    asking = threading.Thread(target=ask, args=("GET", "/metrics"))
    asking.start()
    assert gathering.wait(30)
    assert ask("POST", "/score", {"user": USER, "items": ITEMS})[0] == ask("GET", "/health")[0] == 200
    others.set()
    asking.join()
    assert late == [False]


def test_slow_bodies_keep_nobody_out_and_are_counted(
    served: tuple[Client, hotrow.Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, _ = served
    half = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    monkeypatch.setattr(server, "BODY_S", 0.5)
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", ask.port))) for _ in range(2 * MAX_WAITING)]
        for each in slow:
            each.sendall(half)
        assert ask("POST", "/score", {"rows": [USER]})[0] == 200
        assert all(each.recv(1000).startswith(b"HTTP/1.1 408 ") for each in slow)
    assert figures(ask("GET", "/metrics")[1])['hotrow_requests_total{code="408"}'] == len(slow)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MAX_WAITING", "try again later"),
        ("MAX_HELD", "try again later"),
        ("SCORE_S", "took longer than -1 s; send fewer"),
    ],
)
def test_what_is_too_much_is_given_up(
    served: tuple[Client, hotrow.Scorer], monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    ask, _ = served
    with monkeypatch.context() as patch:
        patch.setattr(server, name, -1)
        code, found = ask("POST", "/score", {"rows": [USER]})
        assert code == 503 and said in found["error"] and ask("GET", "/health")[0] == 200
    assert ask("POST", "/score", {"rows": [USER]})[0] == 200


def test_names_that_the_model_does_not_know_are_told(served: tuple[Client, hotrow.Scorer]) -> None:
    ask, scorer = served
    said = "column 'itme' is none of the model's, and is not read; did you mean 'item'?"
    whole = {**USER, "item": "i1"}
    for rows, refused in (
        ([*ITEMS, {"user": 7, "itme": "i1"}], "'price' is missing"),
        ({"itme": ["i1"], "price": [1.0]}, "'item' is missing; did you mean 'itme'?"),
        ([{**whole, "itme": "i1", "click": 1}], f"{said}; correct its name"),
        ([{**whole, "item": ["i1"], "itme": "i1"}], f"{said}; correct its name"),
    ):
        assert ask("POST", "/score", {"rows": rows})[1]["warnings"] == [said]
        code, found = ask("POST", "/score", {"rows": rows, "strict": True})
        assert code == 400 and refused in found["error"]
    with pytest.warns(UserWarning, match="column 'itme' is none of"):
        scorer.score([{**USER, "itme": 1}])
    assert "warnings" not in ask("POST", "/score", {"rows": [{**USER, "click": 1}]})[1]


def hostile(rng: random.Random) -> bytes | dict[str, Any]:
    """A body that cannot be answered."""
    valid = json.dumps({"user": USER, "items": ITEMS}).encode()
    bad_row: Any = rng.choice([3, None, "x", [1], 1.5, True])
    kinds: list[Any] = [
        valid[: rng.randrange(1, len(valid) - 1)],
        valid.replace(b'"items"', rng.choice([b'"item"', b'"__class__"', b'"rows"', b'"' + b"x" * 5000 + b'"'])),
        valid.replace(b"2.5", rng.choice([b"NaN", b"Infinity", b"-Infinity", b"9" * 5000, b"0x1", b"\xff", b"'1'"])),
        bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200))),
        b"[" * rng.randrange(1000, 200_000),
        {"rows": [*ITEMS, bad_row]},
        {"rows": rng.choice([3, "x", True, None])},
        {"user": bad_row, "items": ITEMS},
        {"user": {"item": 1}, "items": ITEMS},
        {"rows": {"item": ["i1", "i2"], "user": [1]}},
        {"rows": {"item": rng.choice([3, None, "x", True])}},
        {"rows": ITEMS, "strict": rng.choice([1, "true", None])},
        {"user": {"item": 1, "\ud800": 1}, "items": [{"\ud800": 2}]},
        b'{"rows": [{"item": ' + b"[" * 900 + b"]" * 900 + b"}]}",
        b'{"rows": [{"item": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}]}",
        {"rows": {"user": [{f"{key:x}": 1} for key in range(rng.randrange(1, 3000))]}},
        {"user": USER, "items": [{"item": [1, rng.choice([{}, [], [[1]]])]}]},
        {"rows": [{}, USER]},
        {"rows": [USER, {"user ": 1}]},
        {"rows": {"a": [1], "b": [2]}},
        {},
        b"null",
    ]
    return rng.choice(kinds)


@pytest.mark.parametrize("num_requests", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_requests_get_an_error_each(served: tuple[Client, hotrow.Scorer], num_requests: int) -> None:
    ask, scorer = served
    rng, expected, before = random.Random(5), scorer.score(user=USER, items=ITEMS), 0
    for number in range(num_requests):
        before = resident_bytes() if number == num_requests // 10 else before
        body = hostile(rng)
        code, found = ask("POST", "/score", body)
        assert code == 400 and found.keys() == {"error"}, body
        assert "Traceback" not in found["error"] and len(found["error"]) < 1000
    assert resident_bytes() < before + (50 << 20)
    code, found = ask("POST", "/score", b'{"rows": [{"item": "' + b"x" * MAX_BYTES + b'"}]}')
    assert code == 413 and "send fewer rows" in found["error"]
    for large in (
        {"rows": [{}] * (MAX_ROWS + 1)},
        {"rows": {"item": ["i1"] * (MAX_ROWS + 1)}},
        {"user": {"user": "7" * (MAX_SHARED // 1000)}, "items": [{}] * 1000},
        {"user": {"user": [7] * (MAX_SHARED // 3000)}, "items": {"item": ["i1"] * 1000}},
        {"rows": [{"item": [7] * (MAX_CELLS // 2)}, {"item": [7] * (MAX_CELLS // 2)}]},
    ):
        code, found = ask("POST", "/score", large)
        assert code == 413 and re.search("send .*fewer rows", found["error"])
    assert len(ask("POST", "/score", {"rows": [{"user": 7}] * MAX_ROWS})[1]["scores"]) == MAX_ROWS
    code, found = ask("POST", "/score", {"user": USER, "items": ITEMS})
    assert code == 200
    np.testing.assert_array_equal(np.array(found["scores"], np.float32), expected)
    halves, nothing = (ask("POST", "/score", {"rows": [{"item": cell}, *ITEMS]}) for cell in ("\ud800", None))
    assert halves == nothing and halves[0] == 200


def test_a_score_of_no_number_fails(served: tuple[Client, hotrow.Scorer], monkeypatch: pytest.MonkeyPatch) -> None:
    ask, scorer = served
    found = scorer.answer([USER, USER])
    odd = found._replace(scores=np.array([0.5, np.nan], np.float32))
    monkeypatch.setattr(scorer, "answer", lambda **_: odd)
    code, found = ask("POST", "/score", {"rows": [USER, USER]})
    assert code == 400 and "row 1 has no finite score" in found["error"]


def test_a_fault_of_ours_is_said_without_a_traceback(
    served: tuple[Client, hotrow.Scorer], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ask, scorer = served

    def fail(**_: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(scorer, "answer", fail)
    code, found = ask("POST", "/score", {"rows": []})
    assert code == 500 and "secret" not in found["error"]
    assert "RuntimeError: a secret" in capfd.readouterr().err


def test_requests_change_nothing_and_pages_of_other_names_get_nothing(folder: Path) -> None:
    """A page in a browser may make any name lead here."""
    app = make_app(hotrow.Scorer(folder / "out"), hosts={"localhost"})
    own = {route.path: route.methods for route in app.routes if route.path != "/openapi.json"}
    pages = {path: own.pop(path) for path in ("/docs", "/docs/oauth2-redirect")}
    assert own == {"/score": {"POST"}, "/health": {"GET"}, "/metrics": {"GET"}}
    assert [*pages.values()] == [{"GET", "HEAD"}] * 2
    client = TestClient(app, base_url="http://localhost:8080")
    told = client.get("/openapi.json").json()["paths"]["/score"]["post"]["requestBody"]["content"]["application/json"]
    assert [*told["example"]["rows"][0]] == client.get("/health").json()["columns"]
    assert client.get("/docs").status_code == 200
    assert client.post("/score", json=told["example"]).status_code == 200
    for name in ("127.0.0.1", "[::1]:8080", "10.0.0.7", "localhost:8080", "evil.example"):
        code = 403 if name == "evil.example" else 200
        assert client.get("/health", headers={"host": name}).status_code == code, name
        assert client.post("/score", json={"rows": [USER]}, headers={"host": name}).status_code == code, name


def test_without_descriptors_a_line_a_minute_is_logged() -> None:
    passes, told = server.one_a_minute(), list[str]()
    for seconds in (0, 1, 59, 61, 62):
        record = logging.LogRecord("asyncio", 40, "", 0, "socket.accept() out of system resource", (), (None,) * 3)
        record.created = 1e9 + seconds
        told += [f"{seconds}: {record.getMessage()}"] if passes(record) and record.exc_info is None else []
    assert [text.split(":")[0] for text in told] == ["0", "61"] and "ulimit -n" in told[0]
    assert passes(logging.LogRecord("asyncio", 40, "", 0, "another", (), None))


@pytest.mark.parametrize("num_days", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_every_answer_is_of_one_day_while_a_chain_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_days: int
) -> None:
    """`hotrow days` in another process moves the link that a server follows, and two clients ask without end."""
    monkeypatch.setattr(server, "FOLLOW_S", 0.02)
    logs, chain, found, done = tmp_path / "logs", tmp_path / "chain", list[tuple[int, Any]](), threading.Event()
    logs.mkdir()
    words = ("days", logs, "--out", chain, "--label", "click", "--keep", num_days)
    words += ("--set", "train.threads=1", "--set", "train.max_steps=20")

    def go(first: int, last: int) -> None:
        for day in range(first, last):
            pa.csv.write_csv(pa.table(rows(400, seed=day)), logs / f"day_{day}.csv")
        with start_forked(NICE + COMMAND, *words) as child:
            assert child.finish().returncode == 0

    def ask(client: Client) -> None:
        while not done.wait(0.01):
            found.append(client("POST", "/score", {"user": USER, "items": ITEMS}))

    go(0, 1)
    scorer = hotrow.Scorer(chain / "model")
    with serving(scorer, follow=True) as client, ThreadPoolExecutor(2) as executor:
        asking = [executor.submit(ask, client) for _ in range(2)]
        try:
            go(1, num_days)
            while scorer.path != (chain / "model").resolve():
                time.sleep(0.01)
            time.sleep(0.1)
        finally:
            done.set()
        for each in asking:
            each.result()
    truth = dict[str, list[float]]()
    for run in (chain / "runs").iterdir():
        hotrow.load(run).export(whole := tmp_path / f"whole-{run.name}")
        own = hotrow.Scorer(whole)
        truth[own.version] = own.score(user=USER, items=ITEMS).tolist()
    assert all(code == 200 and truth[own["version"]] == own["scores"] for code, own in found), found
    assert len(truth) == num_days and len({own["version"] for _, own in found}) > num_days // 2
    assert go(1, 1) is None and [path.name for path in (chain / "versions").iterdir()] == [f"day_{num_days - 1}"]


NICE = "import os; os.nice(19)\n"


def test_a_version_that_cannot_be_opened_is_said_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "FOLLOW_S", 0.01)
    (link := tmp_path / "model").symlink_to(folder / "out")
    with serving(scorer := hotrow.Scorer(link), follow=True) as ask:
        (beside := tmp_path / "beside").symlink_to(folder)
        beside.replace(link)
        time.sleep(0.3)
        code, found = ask("POST", "/score", {"rows": [USER]})
        assert (code, found["version"]) == (200, scorer.version)
    (said,) = re.findall(".* stays: .*", capfd.readouterr().err)
    assert said == f"version {scorer.version} stays: {folder} has no export.json: export the run again"


def test_where_it_listens_is_said_and_no_answer_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    words = ["serve", str(folder / "out"), "--port"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        err = command(*words, port, code=2)
        assert f"port {port}: Address already in use; choose another" in err
    waits = list[int]()
    off = (socket.IPPROTO_TCP, socket.TCP_NODELAY)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: waits.append(sockets[0].getsockopt(*off)))
    command(*words, "0")
    assert waits == [1]
    assert re.search(r"at http://127\.0\.0\.1:[1-9]\d*/score", command.err)


def test_the_examples_name_what_there_is() -> None:
    examples = Path(__file__).resolve().parents[2] / "examples" / "serving"
    deployment, service = yaml.safe_load_all((examples / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert probes == [{"path": "/health", "port": 8080}] * 3
    assert service["spec"]["ports"][0]["targetPort"] == 8080
    docker = (examples / "Dockerfile").read_text()
    program, verb, *options = json.loads(docker.split("\nCMD ")[1])
    assert (program, verb) == ("hotrow", "serve") and "\nUSER serve\n" in docker
    known = {f"--{name}" for name in signature(cli.serve).parameters}
    assert {option for option in options if option.startswith("--")} <= known
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {option for option in options if option.startswith("/")}

"""A scorer over HTTP: POST /score, GET /health and /metrics, POST /apply and /rollback of deltas.

Whatever a request holds, it gets JSON: an answer, or `{"error": "..."}` with status 400, 408, 413 or 503. Requests name
no files except deltas below the folder that was given at the start, and nothing of them is run.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from hotrow.base.machine import usable_cores
from hotrow.base.version import __version__
from hotrow.data.cells import json_float
from hotrow.serve.scorer import Scorer

MAX_BYTES = 4 << 20
"""The most bytes that a request may have."""
MAX_ROWS = 1 << 14
"""The most rows that a request may have: a row can take three bytes of a body, and kilobytes while it is scored."""
MAX_SHARED = 2 * MAX_BYTES
"""The most bytes that a user's cells may have, times the rows that share them: each row has lists of its own."""
MAX_WAITING = 128
"""Requests with a body beyond these are refused with status 503, so that bodies take half a GiB at most."""
BODY_S = 30.0
"""A body that takes longer to come is refused with status 408: it would keep others out."""
FOLLOW_S = 1.0
"""Seconds between two looks at the link of an export that is followed."""
REMEMBERED = 4096
"""The quantiles of seconds are those of so many requests."""
_SCORE = {"rows": list | dict, "user": dict, "items": list | dict, "strict": bool}


class TooLargeError(ValueError):
    """A request with too many bytes or rows."""

    code = 413


class TooManyError(ValueError):
    """A request that came while too many others were answered."""

    code = 503


class Meter:
    """Counts requests."""

    def __init__(self) -> None:
        self.waiting = 0
        """Requests that are being read or answered."""
        self._lock, self._codes, self._sums = threading.Lock(), Counter[int](), [0, 0.0]
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, code: int, num_rows: int, seconds: float) -> None:
        """Counts a request for scores."""
        with self._lock:
            self._codes[code] += 1
            self._sums = [self._sums[0] + num_rows, self._sums[1] + seconds]
            self._seconds.append(seconds)

    def text(self, scorer: Scorer) -> str:
        """Returns all that is counted, in Prometheus' text format."""
        with self._lock:
            codes, (num_rows, total), seconds = dict(self._codes), self._sums, list(self._seconds)
        lines = ["# TYPE hotrow_requests_total counter"]
        lines += [f'hotrow_requests_total{{code="{code}"}} {count}' for code, count in sorted(codes.items())]
        lines += ["# TYPE hotrow_rows_total counter", f"hotrow_rows_total {num_rows}"]
        lines.append("# TYPE hotrow_request_seconds summary")
        for share in (0.5, 0.99) if seconds else ():
            lines.append(f'hotrow_request_seconds{{quantile="{share}"}} {np.quantile(seconds, share):.6f}')
        lines += [f"hotrow_request_seconds_sum {total:.6f}", f"hotrow_request_seconds_count {sum(codes.values())}"]
        lines.append("# TYPE hotrow_cells_total counter")
        for column, counts in list(scorer.seen.columns.items()):
            name = column.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            lines += [f'hotrow_cells_total{{column="{name}",kind="{kind}"}} {n}' for kind, n in counts.items()]
        lines += ["# TYPE hotrow_version_info gauge", f'hotrow_version_info{{version="{scorer.version}"}} 1']
        return "\n".join(lines) + "\n"


def make_app(scorer: Scorer, *, deltas: Path | None = None) -> FastAPI:
    """Returns an application that scores with `scorer`, to run by itself or to mount in another one.

    deltas: the folder whose deltas `/apply` takes; if None, it takes none.
    """
    app = FastAPI(title="hotrow", version=__version__, docs_url=None, redoc_url=None)
    meter = Meter()
    scoring = ThreadPoolExecutor(usable_cores(), thread_name_prefix="hotrow-score")

    def post(path: str, fields: dict[str, Any], work: Callable[..., dict[str, Any]], executor: Any = None) -> None:
        """Answers requests to `path` by what `work` makes of the fields of their bodies."""

        async def answer(request: Request) -> Response:
            began, found = time.perf_counter(), dict[str, Any]()
            meter.waiting += 1
            try:
                if meter.waiting > MAX_WAITING:
                    raise TooManyError(f"{MAX_WAITING} requests are being answered; try again later")
                async with asyncio.timeout(BODY_S):
                    body = await _read(request)
                loop = asyncio.get_running_loop()
                code, found = 200, await loop.run_in_executor(executor, lambda: work(**_parsed(body, fields)))
            except ValueError as error:
                text = str(error).encode(errors="backslashreplace").decode()  # it may show what is not valid Unicode
                code, found = error.code if isinstance(error, TooLargeError | TooManyError) else 400, {"error": text}
            except TimeoutError:
                code, found = 408, {"error": f"the body did not come within {BODY_S:g} s; send it again"}
            except RecursionError:
                code, found = 400, {"error": "a cell is nested too deeply; pass text, a number or a list of them"}
            except Exception:
                if not await request.is_disconnected():
                    traceback.print_exc(file=sys.stderr)
                code, found = 500, {"error": "the server failed; its log says where"}
            finally:
                meter.waiting -= 1
            if executor is scoring:
                meter.add(code, len(found.get("scores", ())), time.perf_counter() - began)
            return JSONResponse(found, code)

        app.add_api_route(path, answer, methods=["POST"], name=path[1:])

    def score(**body: Any) -> dict[str, Any]:
        _check_rows(body)
        scores, version = scorer.answer(**body)
        if len(bad := np.argwhere(~np.isfinite(scores))):
            raise ValueError(f"row {bad[0, 0]} has no finite score: its numbers are too large")
        return {"scores": scores.tolist(), "version": version}

    def apply(delta: str = "") -> dict[str, Any]:
        assert deltas is not None, "it has no route without them"
        return {"version": scorer.apply(_within(deltas, delta))}

    async def health() -> dict[str, Any]:
        return {"status": "ok", "version": scorer.version, "columns": scorer.columns}

    def metrics() -> Response:  # on a thread of its own: it waits until what rows held is summed
        return PlainTextResponse(meter.text(scorer), media_type="text/plain; version=0.0.4")

    async def elsewhere(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "there is no such path, or it takes another method"}, 404)

    post("/score", _SCORE, score, scoring)
    if deltas is not None:  # a delta takes long: it must not keep scores waiting
        post("/apply", {"delta": str}, apply)
        post("/rollback", {}, lambda: {"version": scorer.rollback()})
    app.add_api_route("/health", health)
    app.add_api_route("/metrics", metrics)
    for code in (404, 405):
        app.add_exception_handler(code, elsewhere)
    return app


def serve(scorer: Scorer, *, host: str, port: int, deltas: Path | None, follow: bool = False) -> None:
    """Serves until the process gets SIGINT or SIGTERM; requests under way are then answered. deltas: see `make_app`.
    follow: whether it takes each version that the export's link comes to lead to.

    Says on stderr where it listens. Raises ValueError if it cannot listen there.
    """
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ValueError(f"cannot listen at {host}, port {port}: {reason}; choose another --port or --host") from None
    where = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    print(f"serving {scorer.path}, version {scorer.version}, at {where}/score", file=sys.stderr)
    app = make_app(scorer, deltas=deltas)
    if follow:
        threading.Thread(target=_follow, args=(scorer,), daemon=True).start()
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listening])


def _follow(scorer: Scorer) -> None:
    """Takes one version after another; says once why one cannot be taken, and goes on."""
    said = ""
    while True:
        try:
            now = f"version {scorer.follow()}"
        except Exception as error:
            now = f"version {scorer.version} stays: {error}"
        if now != said:
            print(now, file=sys.stderr)
        said = now
        time.sleep(FOLLOW_S)


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BYTES:
            raise TooLargeError(f"a request may have {MAX_BYTES:,} bytes; send fewer rows at a time")
    return bytes(body)


def _parsed(body: bytes, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a body. Raises ValueError, which names what is wrong."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not a JSON number; write null for a missing value")

    known = ", ".join(fields) or "none"
    try:
        found = json.loads(body or b"{}", parse_constant=refuse, parse_float=json_float)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"the body is not a JSON object with the fields {known}")
    for name, value in found.items():
        if name not in fields:
            raise ValueError(f"there is no field {name[:80]!r}; the fields are {known}")
        if not isinstance(value, fields[name]):
            raise ValueError(f"{name} is a {type(value).__name__}, which it may not be")
    return found


def _check_rows(body: dict[str, Any]) -> None:
    """Raises TooLargeError if there are too many rows, or too many for the cells that they share."""
    given = body.get("rows", body.get("items", ()))
    columns = given.values() if isinstance(given, dict) else [given]
    num_rows = max((len(own) for own in columns if isinstance(own, list)), default=0)
    if num_rows > MAX_ROWS:
        raise TooLargeError(f"a request may have {MAX_ROWS:,} rows; send fewer rows at a time")
    if num_rows * len(json.dumps(body.get("user", {}), ensure_ascii=False)) > MAX_SHARED:
        raise TooLargeError(
            f"the user's cells for {num_rows:,} rows exceed {MAX_SHARED:,} bytes; send fewer rows at a time"
        )


def _within(deltas: Path, delta: str) -> Path:
    """Returns the folder of a delta. Raises ValueError if it is not below `deltas`."""
    path, folder = (deltas / delta.replace("\0", "/")).resolve(), deltas.resolve()
    if not path.is_relative_to(folder) or path == folder:
        raise ValueError(f"delta is {delta[:80]!r}; name a folder below the one that the server was started with")
    return path

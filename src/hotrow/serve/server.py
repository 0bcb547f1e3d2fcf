"""A scorer over HTTP: POST /score, GET /health, GET /metrics, and POST /apply and /rollback of deltas in one folder.

Whatever a request holds, it gets JSON: an answer, or `{"error": "..."}` with status 400, 413 or 503. Requests name no
files except deltas below the folder that was given at the start, and nothing of them is run.
"""

from __future__ import annotations

import asyncio
import json
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
from hotrow.serve.scorer import Scorer

MAX_BYTES = 8 << 20
"""The most bytes that a request may have."""
MAX_WAITING = 256
"""Connections beyond these are refused with status 503, so that memory is bounded."""
REMEMBERED = 4096
"""The quantiles of seconds are those of so many requests."""
_SCORE = {"rows": list | dict, "user": dict, "items": list | dict, "strict": bool}
_DELTA = {"delta": str}


class TooLargeError(ValueError):
    """A request with too many bytes."""


class Meter:
    """Counts requests."""

    def __init__(self) -> None:
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
        lines = ["# TYPE hotrow_requests counter"]
        lines += [f'hotrow_requests_total{{code="{code}"}} {count}' for code, count in sorted(codes.items())]
        lines += [
            "# TYPE hotrow_rows counter",
            f"hotrow_rows_total {num_rows}",
            "# TYPE hotrow_request_seconds summary",
        ]
        for share in (0.5, 0.99) if seconds else ():
            lines.append(f'hotrow_request_seconds{{quantile="{share}"}} {np.quantile(seconds, share):.6f}')
        lines += [f"hotrow_request_seconds_sum {total:.6f}", f"hotrow_request_seconds_count {sum(codes.values())}"]
        lines.append("# TYPE hotrow_cells counter")
        for column, counts in list(scorer.seen.columns.items()):
            name = column.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            lines += [f'hotrow_cells_total{{column="{name}",kind="{kind}"}} {n}' for kind, n in counts.items()]
        lines += ["# TYPE hotrow_version info", f'hotrow_version_info{{version="{scorer.version}"}} 1']
        return "\n".join(lines) + "\n"


def make_app(scorer: Scorer, *, deltas: Path | None = None) -> FastAPI:
    """Returns an application that scores with `scorer`, to run by itself or to mount in another one.

    deltas: the folder whose deltas `/apply` takes; if None, it takes none.
    """
    app, meter = FastAPI(title="hotrow", version=__version__, docs_url=None, redoc_url=None), Meter()
    scoring = ThreadPoolExecutor(usable_cores(), thread_name_prefix="hotrow-score")

    async def answered(
        request: Request, fields: dict[str, Any], work: Callable[[dict[str, Any]], Any]
    ) -> tuple[int, Any]:
        """Returns the status and the JSON for a request, of whose body `work` makes the answer."""
        try:
            body = _parsed(await _read(request), fields)
            executor = scoring if fields is _SCORE else None  # a delta takes long, and must not keep scores waiting
            return 200, await asyncio.get_running_loop().run_in_executor(executor, work, body)
        except TooLargeError as error:
            return 413, {"error": str(error)}
        except ValueError as error:
            return 400, {"error": str(error)}
        except Exception:
            traceback.print_exc(file=sys.stderr)
            return 500, {"error": "the server failed; its log says where"}

    async def score(request: Request) -> Response:
        """Scores rows: {"rows": [{...}, ...]}, or {"user": {...}, "items": [{...}, ...]}; "strict": true refuses."""
        began, num_rows = time.perf_counter(), 0

        def work(body: dict[str, Any]) -> dict[str, Any]:
            scores, version = scorer.answer(**body)
            return {"scores": scores.tolist(), "version": version}

        code, found = await answered(request, _SCORE, work)
        num_rows = len(found.get("scores", ()))
        meter.add(code, num_rows, time.perf_counter() - began)
        return JSONResponse(found, code)

    async def apply(request: Request) -> Response:
        """Brings the model forward by a delta: {"delta": "NAME"}, a folder below the one given at the start."""
        code, found = await answered(request, _DELTA, lambda body: {"version": scorer.apply(_within(deltas, **body))})
        return JSONResponse(found, code)

    async def rollback(request: Request) -> Response:
        """Goes back to the version before the last delta: {}."""
        code, found = await answered(request, {}, lambda body: {"version": scorer.rollback()})
        return JSONResponse(found, code)

    async def health() -> dict[str, Any]:
        """Says which version scores, and which columns it takes."""
        return {"status": "ok", "version": scorer.version, "columns": scorer.columns}

    async def metrics() -> Response:
        """Returns counts of requests and of what rows held."""
        return PlainTextResponse(meter.text(scorer))

    for path, function in (("/score", score), ("/apply", apply), ("/rollback", rollback)):
        if deltas is not None or function is score:
            app.add_api_route(path, function, methods=["POST"])
    app.add_api_route("/health", health)
    app.add_api_route("/metrics", metrics)
    return app


def serve(scorer: Scorer, *, host: str, port: int, deltas: Path | None) -> None:
    """Serves until the process gets SIGINT or SIGTERM; requests under way are then answered. deltas: see `make_app`."""
    app = make_app(scorer, deltas=deltas)
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False, limit_concurrency=MAX_WAITING)


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
        found = json.loads(body or b"{}", parse_constant=refuse)
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


def _within(deltas: Path | None, delta: str = "") -> Path:
    """Returns the folder of a delta. Raises ValueError if it is not below `deltas`."""
    assert deltas is not None, "apply has no route without it"
    path = (deltas / delta).resolve() if "\0" not in delta else deltas
    if not path.is_relative_to(deltas.resolve()) or path == deltas.resolve():
        raise ValueError(f"delta is {delta[:80]!r}; name a folder below the one that the server was started with")
    return path

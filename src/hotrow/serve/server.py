"""A scorer over HTTP: POST /score, GET /health and /metrics.

Whatever a request holds, it gets JSON: an answer, or `{"error": "..."}` with a status of docs/serve.md. Requests change
nothing, name no files, and contain nothing that is run.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from hotrow.base.machine import usable_cores
from hotrow.base.version import __version__
from hotrow.data.cells import json_float
from hotrow.serve.scorer import Scorer

MAX_BYTES = 4 << 20
"""The most bytes that a request may have."""
MAX_ROWS = 1 << 14
"""The most rows that a request may have: a row can take three bytes of a body, and kilobytes while it is scored."""
MAX_CELLS = 1 << 20
"""The most cells, items of lists included, that a request's rows may have; the user's count in every row."""
MAX_SHARED = 2 * MAX_BYTES
"""The most bytes that a user's cells may have, times the rows that share them: each row has lists of its own."""
MAX_WAITING = 128
MAX_HELD = MAX_WAITING * MAX_BYTES
"""The most requests whose bodies have come, and bytes of all bodies; more are refused with status 503."""
BODY_S, SCORE_S = 10.0, 10.0
"""A body that takes longer to come is refused with status 408, one that takes longer to be scored with 503."""
FOLLOW_S = 1.0
"""Seconds between two looks at the link of an export that is followed."""
REMEMBERED = 4096
"""The number of latest requests whose seconds give the quantiles."""
NESTING = {list, dict}
FIELDS = {"rows": list | dict, "user": dict, "items": list | dict, "strict": bool}


class RefusedError(ValueError):
    """A request that is refused with a status of its own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Meter:
    """Counts requests."""

    def __init__(self) -> None:
        self.waiting, self.held = 0, 0
        """Requests that have come and are being answered; bytes of these and of bodies that are coming."""
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


def make_app(scorer: Scorer, *, hosts: Collection[str] | None = None) -> FastAPI:
    """Returns an application that scores with `scorer`, to run by itself or to mount in another one.

    hosts: the names that a Host header may have, besides addresses; if None, any.
    """

    async def guard(request: Request) -> None:
        _check_host(request, hosts)

    guarded = [Depends(guard)]
    app = FastAPI(title="hotrow", version=__version__, redoc_url=None, dependencies=guarded)
    meter = Meter()
    scoring = ThreadPoolExecutor(usable_cores(), thread_name_prefix="hotrow-score")

    async def answer(request: Request) -> Response:
        began, found, body, is_waiting = time.perf_counter(), dict[str, Any](), bytearray(), False
        try:
            async with asyncio.timeout(BODY_S):
                await _read(request, body, meter)
            if meter.waiting >= MAX_WAITING:
                raise RefusedError(503, f"{MAX_WAITING} requests are being answered; try again later")
            meter.waiting, is_waiting = meter.waiting + 1, True
            loop = asyncio.get_running_loop()
            code, found = 200, await loop.run_in_executor(scoring, lambda: score(**_parsed(body)))
        except ValueError as error:
            text = str(error).encode(errors="backslashreplace").decode()  # it may show what is not valid Unicode
            code, found = getattr(error, "code", 400), {"error": text}
        except TimeoutError:
            code, found = 408, {"error": f"the body did not come within {BODY_S:g} s; send it again"}
        except Exception:
            if not await request.is_disconnected():
                traceback.print_exc(file=sys.stderr)
            code, found = 500, {"error": "the server failed; its log says where"}
        finally:
            meter.waiting -= is_waiting
            meter.held -= len(body)
        meter.add(code, len(found.get("scores", ())), time.perf_counter() - began)
        return JSONResponse(found, code)

    def score(**body: Any) -> dict[str, Any]:
        until = time.monotonic() + SCORE_S
        _check_rows(body)
        try:
            scores, version, warning = scorer.answer(**body, until=until)
        except TimeoutError:
            raise RefusedError(503, f"scoring took longer than {SCORE_S:g} s; send fewer rows at a time") from None
        if len(bad := np.argwhere(~np.isfinite(scores))):
            raise ValueError(f"row {bad[0, 0]} has no finite score: its numbers are too large")
        return {"scores": scores.tolist(), "version": version, **({"warnings": [warning]} if warning else {})}

    async def health() -> dict[str, Any]:
        return {"status": "ok", "version": scorer.version, "columns": scorer.columns}

    def metrics() -> Response:  # on a thread of its own: it waits until what rows held is summed
        return PlainTextResponse(meter.text(scorer), media_type="text/plain; version=0.0.4")

    async def refused(request: Request, error: Exception) -> Response:
        text = str(error) if isinstance(error, RefusedError) else "there is no such path, or it takes another method"
        return JSONResponse({"error": text}, getattr(error, "code", 404))

    app.add_api_route("/score", answer, methods=["POST"], openapi_extra=_body_of(scorer.columns))
    app.add_api_route("/health", health)
    app.add_api_route("/metrics", metrics)
    for kind in (404, 405, RefusedError):
        app.add_exception_handler(kind, refused)
    return app


def _body_of(columns: Collection[str]) -> dict[str, Any]:
    """The body of POST /score for the page /docs, with the columns of the model."""
    cells, kinds = {"type": "object"}, {list | dict: "array", dict: "object", bool: "boolean"}
    fields = {
        name: {"type": kinds[kind], **({"items": cells} if kind == list | dict else {})}
        for name, kind in FIELDS.items()
    }
    content = {"schema": {**cells, "properties": fields}, "example": {"rows": [dict.fromkeys(columns, "a value")]}}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def one_a_minute() -> Callable[[logging.LogRecord], bool]:
    """A filter of the thousands of records in which asyncio says that it has no descriptor to accept with."""
    until = 0.0

    def passes(record: logging.LogRecord) -> bool:
        nonlocal until
        if str(record.msg).startswith("socket.accept()"):
            if record.created < until:
                return False
            until, record.exc_info = record.created + 60, None
            record.msg = "no descriptor is left for another connection: close some, or raise `ulimit -n`"
        return True

    return passes


def serve(scorer: Scorer, *, host: str, port: int, follow: bool = False) -> None:
    """Serves until the process gets SIGINT or SIGTERM; requests under way are then answered.

    follow: whether it takes each new version that the export's link leads to. Says on stderr where it listens. Raises
    ValueError if it cannot listen there.
    """
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ValueError(f"cannot listen at {host}, port {port}: {reason}; choose another --port or --host") from None
    # Connections inherit it; asyncio sets it only on sockets that say their protocol, and an answer would wait 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    where = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    print(f"serving {scorer.path}, version {scorer.version}, at {where}/score", file=sys.stderr)
    is_open = not listening.getsockname()[0].startswith(("127.", "::1"))
    app = make_app(scorer, hosts=None if is_open else {"localhost", host})
    logging.getLogger("asyncio").addFilter(one_a_minute())
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


async def _read(request: Request, body: bytearray, meter: Meter) -> None:
    async for piece in request.stream():
        body += piece
        meter.held += len(piece)
        if len(body) > MAX_BYTES:
            raise RefusedError(413, f"a request may have {MAX_BYTES:,} bytes; send fewer rows at a time")
        if meter.held > MAX_HELD:
            raise RefusedError(503, "too many bodies are being read; try again later")


def _check_host(request: Request, hosts: Collection[str] | None) -> None:
    """Raises RefusedError of a request to another name than this server's: a page made that name lead here."""
    host = request.headers.get("host", "")
    name = urlsplit(f"//{host}").hostname or "localhost"
    with suppress(ValueError):
        name = "" if ipaddress.ip_address(name) else name
    if name and hosts is not None and name not in hosts:
        raise RefusedError(403, f"Host is {name[:80]!r}; send an address or {', '.join(sorted(hosts))}, or set --host")


def _parsed(body: bytearray) -> dict[str, Any]:
    """Returns the fields of a body. Raises ValueError, which names what is wrong."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not a JSON number; write null for a missing value")

    known = ", ".join(FIELDS)
    try:
        found = json.loads(body, parse_constant=refuse, parse_float=json_float)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"the body is not a JSON object with the fields {known}")
    for name, value in found.items():
        if name not in FIELDS:
            raise ValueError(f"there is no field {name[:80]!r}; the fields are {known}")
        if not isinstance(value, FIELDS[name]):
            raise ValueError(f"{name} is a {type(value).__name__}, which it may not be")
    return found


def _check_rows(body: dict[str, Any]) -> None:
    """Raises RefusedError if there are too many rows or cells, or too many for the cells that they share, and
    ValueError if a cell is neither a scalar nor a flat list of them."""
    given, user = body.get("rows", body.get("items", [])), body.get("user", {})
    if isinstance(given, dict):
        parts = {f"column {name[:80]!r}": own for name, own in given.items() if isinstance(own, list)}
    else:
        parts = {f"row {row}": [*own.values()] for row, own in enumerate(given) if isinstance(own, dict)}
    num_rows = len(given) if isinstance(given, list) else max(map(len, parts.values()), default=0)
    if num_rows > MAX_ROWS:
        raise RefusedError(413, f"a request may have {MAX_ROWS:,} rows; send fewer rows at a time")
    num_cells = _num_cells(parts) + num_rows * _num_cells({"the user": user.values()})
    if num_cells > MAX_CELLS:
        raise RefusedError(413, f"{num_cells:,} cells and items of lists; send {MAX_CELLS:,} at a time, in fewer rows")
    if num_rows * len(json.dumps(user, ensure_ascii=False)) > MAX_SHARED:
        text = f"the user's cells for {num_rows:,} rows exceed {MAX_SHARED:,} bytes; send fewer rows at a time"
        raise RefusedError(413, text)


def _num_cells(parts: Mapping[str, Collection[Any]]) -> int:
    """Cells, with the items of those that are lists. Raises ValueError if one is nested, naming its part."""
    num_cells = sum(map(len, parts.values()))
    for where, own in parts.items():
        for cell in () if NESTING.isdisjoint(map(type, own)) else own:
            if type(cell) is dict or (type(cell) is list and not NESTING.isdisjoint(map(type, cell))):
                raise ValueError(f"{where} has a cell that is nested; pass text, a number, or a flat list of them")
            num_cells += len(cell) if type(cell) is list else 0
    return num_cells

"""The heartbeat of a run: a rank that dies, stops or fails is named on every other rank, and all processes end.

A collective of gloo waits half an hour for a rank that will never answer, and its error does not say for which rank. So
the ranks watch each other beside the collectives, on TCP connections of their own:

    rank 1 ---+
    rank 2 ---+--- rank 0        every BEAT_S each end of a connection sends its step; rank 0 tells all others what
    rank 3 ---+                  ended one of them; when rank 0 is lost, each rank sees that by itself

A connection that closes is a process that died; LIMIT_S of silence is one that is stopped, or a network that is
interrupted. On one machine a silent process that still runs has more time (BUSY_S). A thread watches,
so that the process ends (`os._exit`) even if its main thread waits in a collective. That is safe for files: a
checkpoint and every file that is read back get their names when they are complete.

A line of the protocol is a JSON object. The first one of a connection is {"token", "rank"}; then {"step"} is a beat,
{"done"} says that this rank has left the block in good order (from rank 0: that all have), and {"end", "code"} is the
line with which every rank ends.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotrow.parallel.agreement import CommonError, everyone
from hotrow.parallel.communicator import Communicator, TransportError
from hotrow.parallel.hosts import interfaces, namespace_id

BEAT_S = 0.5
"""Time between two beats."""
LIMIT_S = 3.5
"""A rank that was silent for this long is lost. A pause of the network, or of a process, that is shorter does not end
a run: with TCP's repeats, up to about 2 s. With it, every rank has named the lost one within 5 s."""
BUSY_S = 30.0
"""A silent rank on this machine is lost only after this long if it is running, ready to run, or waits for a disk: if a
machine has too much to do, a process that is whole may say nothing for longer than LIMIT_S."""
START_S = 30.0
"""Time in which all ranks must have connected to rank 0."""
TICK_S = 0.1
"""The time that the watching thread sleeps between two checks."""
GRACE_S = 0.3
"""When another rank has failed, this is the time that this rank's main thread has to raise an error of its own: if all
ranks meet the same error, each reports it in its own way."""
LAST_S = 1.0
"""The longest time that a process that ends waits: for `last_words`, and for the others to have read why."""
LOST = 3
"""Exit code of every rank after one was lost."""
MAX_LINE_BYTES = 1 << 16
"""Longest line of the protocol."""
KEPT = "The newest checkpoint is whole, because a checkpoint gets its name when it is complete."
MAX_TEXT = 8_000
"""Characters of an error's text that other ranks get."""

Message = dict[str, Any]


@dataclass
class Peer:
    """The other end of a connection."""

    rank: int
    host: str
    pid: int
    socket: socket.socket
    is_here: bool
    """Whether this process sees it in /proc."""
    received: bytes = b""
    """What came after the last whole line."""
    heard_s: float = 0.0
    step: int = 0
    is_done: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    def send(self, message: Message) -> None:
        """Sends a line. A connection that does not take it is left to whoever reads from it."""
        with suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> tuple[list[Message], bool]:
        """Returns the lines that have come, and whether the connection is still open."""
        try:
            data = self.socket.recv(MAX_LINE_BYTES)
        except TimeoutError:
            return [], True
        except OSError:
            data = b""
        *lines, self.received = (self.received + data).split(b"\n")
        messages = list(_parsed(lines))
        is_open = bool(data) and len(self.received) < MAX_LINE_BYTES and len(messages) == len(lines)
        return messages, is_open


def _parsed(lines: Sequence[bytes]) -> Iterator[Message]:
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        yield message


class Heartbeat:
    """Watches all ranks inside the block; with one rank it does nothing. Entering and leaving it is collective.

    If a rank is lost, every other process prints one line and ends with exit code LOST. If the block raises on one
    rank, the exception leaves it there, and every other process prints "rank R: TypeOfError: text" and ends with the
    code that `exit_code` gives the error. Leaving the block without an error, or with one that all ranks raise,
    waits until all ranks have come so far; the watching thread has then ended, and nothing that it was given is held
    any more. Raises ValueError on entering if ranks cannot connect to rank 0. Attributes that are public may change
    inside the block.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        cure: str,
        step: Callable[[], int] = lambda: 0,
        last_words: Callable[[str], None] | None = None,
    ) -> None:
        self.comm = comm
        self.cure = cure
        """A sentence that says how the run goes on, for the line that names a lost rank."""
        self.step = step
        """Returns the number of steps that this rank has taken; the watching thread calls it."""
        self.last_words = last_words
        """Is told why the process ends before it does, to log it. It gets LAST_S, in a thread."""
        self._peers: list[Peer] = []
        self._thread: threading.Thread | None = None
        self._sending = threading.Lock()
        self._is_done = False  # the block was left without an error
        self._is_ending = False  # another rank has ended the run
        self._failed = threading.Event()  # the block raised an error of this rank's own
        self._over = threading.Event()  # all ranks have left the block without an error

    def __enter__(self) -> Heartbeat:
        if self.comm.size > 1:
            self._peers = connect(self.comm)
            self._thread = threading.Thread(target=self._watch_safely, name="hotrow-heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._thread is None:
            return
        if error is None or isinstance(error, CommonError) or (code := exit_code(error)) == 0:
            self._is_done = True
            if self.comm.rank:
                self._send({"done": True})
            self._over.wait()
            self._thread.join(BUSY_S)
        else:
            if _follows(error) or (isinstance(error, KeyboardInterrupt) and self._is_ending):
                # Some rank was lost or failed. The watching thread ends this process as soon as it knows which.
                self._over.wait(LIMIT_S + 2 * BEAT_S)
            self._failed.set()
            told = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_TEXT]
            self._send({"end": f"rank {self.comm.rank}: {told}", "code": code})
            self._thread.join(LAST_S)
            self._hang_up()
        self._let_go()

    def _let_go(self) -> None:
        """Closes the connections and drops what was given. Raises RuntimeError if a run that is done is still watched.

        `step` and `last_words` reach the run's tensors. A thread that drops the last one while the interpreter ends
        aborts the process, after all work was done.
        """
        for peer in self._peers:
            peer.socket.close()
        self._peers = []
        self.step, self.last_words = int, None  # int() is 0, as the default of `step` is
        if self._is_done and self._thread is not None and self._thread.is_alive():
            raise RuntimeError(f"rank {self.comm.rank} is done, but its heartbeat did not end within {BUSY_S:.0f} s")

    # ---- the watching thread

    def _watch_safely(self) -> None:
        try:
            self._watch()
        except Exception as error:  # a watch that ended in silence would look like a stopped rank to the others
            self._end_all(f"rank {self.comm.rank}: the heartbeat failed: {type(error).__name__}: {error}", 1)

    def _watch(self) -> None:
        last_s = next_beat_s = time.monotonic()
        for peer in self._peers:
            peer.heard_s = last_s
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.socket, selectors.EVENT_READ, peer)
            while not self._failed.is_set() and not self._over.is_set():
                ready = selector.select(TICK_S)
                now_s = time.monotonic()
                # If this process itself was stopped, it has not listened: the others are given that time.
                pause_s = now_s - last_s if now_s - last_s > LIMIT_S / 2 else 0.0
                last_s = now_s
                for peer in self._peers:
                    peer.heard_s += pause_s
                for key, _ in ready:
                    if not self._listen(key.data, now_s):
                        selector.unregister(key.fileobj)
                if now_s >= next_beat_s:
                    self._send({"step": self.step()})
                    next_beat_s = now_s + BEAT_S
                self._look_for_silence(now_s)
                if self.comm.rank == 0 and self._is_done and all(peer.is_done for peer in self._peers):
                    self._send({"done": True})
                    self._over.set()

    def _listen(self, peer: Peer, now_s: float) -> bool:
        """Takes what came from `peer`; returns whether its connection is still open."""
        messages, is_open = peer.receive()
        peer.heard_s = now_s
        for message in messages:
            peer.step = int(message.get("step", peer.step))
            peer.is_done = peer.is_done or "done" in message
            if "end" in message:
                self._end_all(str(message["end"]), int(message.get("code", 1)), known_to=peer)
        if self.comm.rank and peer.is_done:
            self._over.set()
        elif not is_open and not peer.is_done:
            self._lose(
                peer,
                "its process ended without a word, as after SIGKILL, a crash, or when memory ran out (see dmesg there)",
            )
        return is_open

    def _look_for_silence(self, now_s: float) -> None:
        for peer in self._peers:
            silent_s = now_s - peer.heard_s
            limit_s = BUSY_S if silent_s > LIMIT_S and peer.is_here and _is_running(peer.pid) else LIMIT_S
            if silent_s > limit_s and not peer.is_done:
                self._lose(
                    peer,
                    f"no sign of life for {limit_s} s: its process is stopped, its machine is down or overloaded, or "
                    "the network to it is interrupted",
                )

    def _lose(self, peer: Peer, why: str) -> None:
        when = f" at step {peer.step}" if peer.step else ""
        self._end_all(f"{peer} was lost{when}: {why}. All ranks end. {KEPT} {self.cure}", LOST)

    def _end_all(self, text: str, code: int, *, known_to: Peer | None = None) -> None:
        """Tells all others, except `known_to`, and ends this process, if its main thread does not fail by itself."""
        if self._failed.is_set():  # this rank is the one that ends the run
            return
        self._is_ending = True
        self._send({"end": text, "code": code}, without=known_to)
        # A lost rank is named at once: torchrun ends its processes 0.1 s after it has seen one end.
        if code != LOST and self._failed.wait(GRACE_S):
            return
        os.write(2, f"hotrow: {text}\n".encode())  # sys.stderr may be locked by the main thread
        last = threading.Thread(target=self._finish, args=(text,), daemon=True)
        last.start()
        self._hang_up()
        last.join(LAST_S)
        os._exit(code)

    def _finish(self, text: str) -> None:
        with suppress(Exception):
            if self.last_words is not None:
                self.last_words(text)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()

    # ---- both threads

    def _send(self, message: Message, *, without: Peer | None = None) -> None:
        with self._sending:
            for peer in self._peers:
                if peer is not without:
                    peer.send(message)

    def _hang_up(self) -> None:
        """Closes the way out and waits, at most LAST_S, until the others have closed theirs: they have read then."""
        until_s = time.monotonic() + LAST_S
        for peer in self._peers:
            with suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)
        for peer in self._peers:
            with suppress(OSError):
                while (left_s := until_s - time.monotonic()) > 0:
                    peer.socket.settimeout(left_s)
                    if not peer.socket.recv(MAX_LINE_BYTES):
                        break


def _is_running(pid: int) -> bool:
    """Returns whether a thread of a process runs, is ready to run, or waits for a disk: none does if it was stopped."""
    states = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            states.add(path.read_text(encoding="utf-8").rpartition(")")[2].split()[0])
    return not states.isdisjoint(("R", "D"))


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a process that ends by `error`: 2 for what its user can mend, as on the command line."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, ValueError | OSError | MemoryError) else 1


def _follows(error: BaseException | None) -> bool:
    """Returns whether `error` says that an exchange broke: then another rank is the cause."""
    while error is not None:
        if isinstance(error, TransportError):
            return True
        error = error.__cause__ or error.__context__
    return False


# ---- connections


def connect(comm: Communicator) -> list[Peer]:
    """Returns, on rank 0, the connections to all other ranks; on the others, the one to rank 0. Collective. Raises
    ValueError, on the ranks concerned, if one could not connect within START_S."""
    mine = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "net": namespace_id("net"),
        "processes": namespace_id("pid"),
    }
    ranks = everyone(comm, mine)
    is_local = len({each["net"] for each in ranks}) == 1
    listener, place = None, {}
    if comm.rank == 0:
        listener = _listener(is_local=is_local)
        addresses = ["127.0.0.1"] if is_local else _addresses()
        place = {"addresses": addresses, "port": listener.getsockname()[1], "token": secrets.token_hex(16)}
    place = everyone(comm, place)[0]
    if listener is None:
        sockets = {0: _call(place, comm.rank)}
    else:
        with listener:
            sockets = _answer(listener, place, ranks)
    return [
        Peer(
            rank,
            ranks[rank]["host"],
            ranks[rank]["pid"],
            connection,
            is_here=ranks[rank]["processes"] == mine["processes"],
            received=received,
        )
        for rank, (connection, received) in sockets.items()
    ]


def _listener(*, is_local: bool) -> socket.socket:
    if is_local:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _addresses() -> list[str]:
    """Returns addresses at which other hosts may reach this one, the likeliest first."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = interfaces()
    found = [own.get(name), os.environ.get("MASTER_ADDR"), socket.gethostname(), *own.values()]
    return list(dict.fromkeys(address for address in found if address))


def _answer(
    listener: socket.socket, place: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> dict[int, tuple[socket.socket, bytes]]:
    """Returns the connection of every other rank, when all have come."""
    found: dict[int, tuple[socket.socket, bytes]] = {}
    until_s = time.monotonic() + START_S
    while len(found) < len(ranks) - 1:
        try:
            listener.settimeout(max(until_s - time.monotonic(), 0.01))
            connection, _ = listener.accept()
        except TimeoutError:
            absent = [f"rank {rank} ({each['host']})" for rank, each in enumerate(ranks) if rank and rank not in found]
            for connection, _ in found.values():
                connection.close()
            raise ValueError(
                f"{', '.join(absent)} did not connect to the heartbeat of rank 0 (port {place['port']} of "
                f"{' or '.join(place['addresses'])}) within {START_S:.0f} s: {_NETWORK_CURE}"
            ) from None
        hello, received = _first_line(connection, until_s=time.monotonic() + 2.0)
        rank = hello.get("rank")
        is_ours = hmac.compare_digest(str(hello.get("token")).encode(), place["token"].encode())
        if is_ours and isinstance(rank, int) and 0 < rank < len(ranks) and rank not in found:
            found[rank] = connection, received
        else:
            connection.close()  # not of this run
    for connection, _ in found.values():
        _prepare(connection)
        connection.sendall(b'{"step": 0}\n')
    return found


_NETWORK_CURE = (
    "allow TCP between the hosts of a run, and set GLOO_SOCKET_IFNAME on each to an interface that the others reach"
)


def _call(place: Mapping[str, Any], rank: int) -> tuple[socket.socket, bytes]:
    """Returns a connection to rank 0, when all ranks have connected to it."""
    until_s, why = time.monotonic() + START_S, ""
    while time.monotonic() < until_s:
        for address in place["addresses"]:
            try:
                connection = socket.create_connection((address, place["port"]), timeout=3.0)
                connection.sendall(json.dumps({"token": place["token"], "rank": rank}).encode() + b"\n")
                # Rank 0 may wait for others for START_S, and began to wait after this rank did.
                beat, received = _first_line(connection, until_s=time.monotonic() + START_S + LAST_S)
            except OSError as error:
                why = f"{address}: {error}"
                continue
            if beat:
                _prepare(connection)
                return connection, received
            connection.close()
            why = f"{address}: the connection was closed"
        time.sleep(TICK_S)
    raise ValueError(
        f"rank {rank} ({socket.gethostname()}) did not reach the heartbeat of rank 0, port {place['port']} of "
        f"{' or '.join(place['addresses'])}, within {START_S:.0f} s ({why}): {_NETWORK_CURE}"
    )


def _first_line(connection: socket.socket, *, until_s: float) -> tuple[Message, bytes]:
    """Returns the first message of a connection ({}: none came by then), and what came after it."""
    data = b""
    with suppress(OSError):
        while b"\n" not in data and len(data) < MAX_LINE_BYTES:
            connection.settimeout(max(until_s - time.monotonic(), 0.01))
            if not (more := connection.recv(4096)):
                break
            data += more
    line, newline, rest = data.partition(b"\n")
    return (next(_parsed([line]), {}) if newline else {}), rest


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(1.0)  # for a peer that takes nothing; reads follow select

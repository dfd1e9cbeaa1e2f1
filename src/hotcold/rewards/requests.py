"""JSON over HTTP for rewards that live on a server: deadlines, second tries after a pause, never to another address."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

from hotcold.errors import InputError, RewardError

PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before the second try; it doubles up to the longest
PATIENCE = 120.0  # seconds that a server may ask us to wait
MOST = 10**7  # bytes of an answer
MOST_LATE = 16  # requests in a row without an answer in time, before the run stops
AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class Failed(Exception):
    """A request without an answer."""

    def __init__(self, cause: str, again: bool = True, after: float | None = None, late: bool = False) -> None:
        Exception.__init__(self, cause)
        self.again, self.after = again, after  # whether, and in how many seconds, to try again
        self.kind: Literal["timeout", "raised"] = "timeout" if late else "raised"


@dataclass(frozen=True)
class Address:
    scheme: str
    host: str
    port: int | None
    path: str  # with the query

    @property
    def is_local(self) -> bool:
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:  # a name, which may be anybody's: 127.0.0.1.example.com
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}{'' if self.port is None else f':{self.port}'}{self.path}"


def address_of(url: str, what: str) -> Address:
    """`what` is given: "reward=judge?url=..."."""
    shown = "this" if "@" in url else repr(url)  # a password may stand in it
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InputError(f"{what}: {shown} is no address ({error}). Write http://HOST:PORT/PATH.") from None
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or any(c <= " " for c in url):
        raise InputError(f"{what}: {shown} is no address. Write http://HOST:PORT/PATH.")
    if parts.username is not None or parts.password is not None:
        raise InputError(f"{what}: leave name and password out of the address; key_env=NAME names a variable.")
    return Address(parts.scheme, host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def key_of(variable: str | None, address: Address, what: str) -> str | None:
    """The key that the variable of the environment holds. It is sent, and neither stored nor shown."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InputError(f"{what}: the variable {variable} of the environment is not set. Set it to the key.")
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{what}: the variable {variable} holds what no key has (a line break, an accent).")
    if address.scheme == "http" and not address.is_local:
        raise InputError(f"{what}: the key would cross the network unencrypted. Use https://.")
    return key


class Client:
    """Asks one address. Several requests at a time, each in a thread."""

    def __init__(self, address: Address, key: str | None, timeout: float, retries: int, concurrency: int) -> None:
        self.address, self._key = address, key
        self.timeout, self.retries, self.concurrency = timeout, retries, concurrency
        self.counts: Counter[str] = Counter()
        self.beat: Callable[[str], None] = lambda stage: None
        self._random = random.Random()  # not the run's: pauses change nothing that is trained
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._open: set[socket.socket] = set()
        self._has_answered, self._late = False, 0  # ever; requests in a row that were late

    def ask_all(self, contents: Sequence[Any]) -> list[Any]:
        """The answer to each, or Failed. One that no second try repairs ends it with RewardError."""
        self._stop.clear()
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="reward")
        alone = 0 if self._has_answered else 1
        try:
            found = [self._first(content) for content in contents[:alone]]
            futures = [pool.submit(self._ask, content) for content in contents[alone:]]
            return found + [self._told(future.result()) for future in futures]
        except BaseException:
            self._abandon()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _first(self, content: Any) -> Any:
        """The first request of all goes alone: where it fails, nobody waits for the others."""
        answer = self._told(self._ask(content))
        if isinstance(answer, Failed):
            raise RewardError(f"{self.address}: {answer}.\nIt has never answered: is the server up, the address right?")
        self._has_answered = True
        return answer

    def _told(self, answer: Any) -> Any:
        self.beat("scoring")
        is_late = isinstance(answer, Failed) and answer.kind == "timeout"
        self._late = self._late + 1 if is_late else 0
        if isinstance(answer, Failed) and not answer.again:
            raise RewardError(f"{self.address}: {answer}")
        if self._late >= MOST_LATE:
            raise RewardError(f"{self.address}: {answer}, {self._late} times in a row.")
        return answer

    def _abandon(self) -> None:
        self._stop.set()
        with self._lock:
            for one in self._open:
                _hang_up(one)

    def _ask(self, content: Any) -> Any:
        body = json.dumps(content, ensure_ascii=True, default=str).encode()
        for number in range(self.retries + 1):
            with self._lock:
                self.counts["retries" if number else "calls"] += 1
            try:
                return self._once(body)
            except Failed as failed:
                last = failed
            pause = min(LONGEST_PAUSE, PAUSE * 2**number) * self._random.uniform(0.5, 1.0)
            pause = max(pause, last.after or 0.0)
            if last.kind == "timeout" and number and not self._has_answered:
                break
            if not last.again or number == self.retries or pause > PATIENCE or self._stop.wait(pause):
                break
        return last

    def _once(self, body: bytes) -> Any:
        """One request. The connection is cut at the deadline, whatever it is at."""
        from http.client import HTTPConnection, HTTPException, HTTPSConnection

        kind = HTTPSConnection if self.address.scheme == "https" else HTTPConnection
        connection = kind(self.address.host, self.address.port, timeout=self.timeout)
        end = time.monotonic() + self.timeout
        timer = None
        try:
            connection.connect()
            one = connection.sock
            timer = threading.Timer(max(0.0, end - time.monotonic()), _hang_up, [one])
            timer.daemon = True
            timer.start()
            with self._lock:
                self._open.add(one)
            try:
                connection.request("POST", self.address.path, body, self._headers())
                response = connection.getresponse()
                said = response.read(MOST + 1)
                if response.length and len(said) <= MOST:
                    raise OSError("the answer breaks off")
                return self._read(response.status, response.getheader("Retry-After"), said)
            finally:
                with self._lock:
                    self._open.discard(one)
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, TimeoutError) or time.monotonic() >= end:
                raise Failed(f"no answer within timeout={self.timeout:g} s", late=True) from None
            raise Failed(self._hidden(f"{type(error).__name__}: {error}")) from None
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        return headers | ({} if self._key is None else {"Authorization": f"Bearer {self._key}"})

    def _read(self, status: int, after: str | None, body: bytes) -> Any:
        if 300 <= status < 400:
            raise Failed(f"status {status}: it sends us to another address, where nothing is sent", again=False)
        if status >= 400:
            said = self._hidden(" ".join(body[:2000].decode(errors="replace").split()))[:200]
            again = status in AGAIN
            raise Failed(f"status {status}{': ' if said else ''}{said}", again, _after(after))
        if len(body) > MOST:
            raise Failed(f"an answer of more than {MOST} bytes", again=False)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise Failed("an answer that is no JSON") from None

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _after(text: str | None) -> float | None:
    """Seconds of a Retry-After: a number, or a date."""
    from email.utils import parsedate_to_datetime

    if text is None:
        return None
    try:
        if text.strip().isdigit():
            return float(text)
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _hang_up(one: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        one.shutdown(socket.SHUT_RDWR)

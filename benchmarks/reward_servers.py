"""Time per score of a judge and of a remote reward on a local server, and of each form of another trainer's reward.

    python benchmarks/reward_servers.py [--out FOLDER] [--scores 1000]

The server answers at once, so what is measured is our own share: marks, requests, threads, parsing. Beside it stands
what a user would write: the same request in a loop with `urllib`. The forms are called in this process and in a worker,
whose start is not counted; each compares the response with the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from hotcold.rewards.base import Scorable
from hotcold.rewards.failures import Limits
from hotcold.rewards.functions import load_reward
from hotcold.rewards.scorer import FunctionScorer, load_scorer

FORMS = {
    "plain": "def f(completion, answer):\n    return float(completion == answer)\n",
    "trl": (
        "def f(prompts, completions, answer, **kwargs):\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    ),
    "verl": (
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth)\n"
    ),
    "openrlhf": (
        "def f(queries, prompts, labels):\n"
        "    return {'rewards': [float(q == p + l) for q, p, l in zip(queries, prompts, labels)]}\n"
    ),
    "verifiers": "async def f(completion, answer, state):\n    return float(completion == answer)\n",
}


class Answers(BaseHTTPRequestHandler):
    """A judge that reads the length of the request, and a remote reward of ones."""

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = "VERDICT: 5" if "right" in str(content.get("messages", "")[-1:]) else "VERDICT: 0"
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        body = json.dumps({"rewards": [1.0] * len(content.get("query", ())), "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128


def items(num: int) -> list[Scorable]:
    columns = [{"answer": str(n), "ground_truth": str(n), "data_source": "sums"} for n in range(num)]
    texts = [str(n) if n % 2 == 0 else f"right {n}" for n in range(num)]
    return [
        Scorable("2+2=", text, (1,), (2,), found, row=n)
        for n, (text, found) in enumerate(zip(texts, columns, strict=True))
    ]


def milliseconds(score: Callable[[Sequence[Scorable]], Any], batch: Sequence[Scorable]) -> float:
    start = time.perf_counter()
    score(batch)
    return 1000 * (time.perf_counter() - start) / len(batch)


def by_urllib(url: str) -> Callable[[Sequence[Scorable]], None]:
    def score(batch: Sequence[Scorable]) -> None:
        for item in batch:
            content = {"model": "m", "messages": [{"role": "user", "content": f"Judge {item.completion}"}]}
            request = Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
            with urlopen(request) as answer:
                json.loads(answer.read())

    return score


def of_servers(num: int) -> list[tuple[str, str, float]]:
    server = Server(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    batch = items(num)
    judge = FunctionScorer([load_reward(f"judge?url={url}&model=m&canaries=false")], [1.0])
    rows = [
        ("judge", "8 requests at a time", milliseconds(judge.score, batch)),
        ("judge", "every verdict known", milliseconds(judge.score, batch)),
        ("judge", "urllib in a loop", milliseconds(by_urllib(f"{url}/v1/chat/completions"), batch)),
    ]
    for size in (64, 1):
        remote = FunctionScorer([load_reward(f"{url}/get_reward#batch={size}")], [1.0])
        rows.append(("remote", f"batch={size}", milliseconds(remote.score, batch)))
    server.shutdown()
    return rows


def of_forms(num: int) -> list[tuple[str, str, float]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for form, text in FORMS.items():
            file = Path(folder, f"of_{form}.py")
            file.write_text(text)
            here = FunctionScorer([load_reward(str(file))], [1.0])
            rows.append((form, "in this process", milliseconds(here.score, items(num))))
            there = load_scorer([str(file)], [1.0], Limits())
            there.score(items(2))
            rows.append((form, "in a worker", milliseconds(there.score, items(num))))
            there.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scores", type=int, default=1000)
    arguments = parser.parse_args()
    rows = [*of_servers(arguments.scores), *of_forms(arguments.scores)]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    about = f"{os.cpu_count()} cores, load {load}, Python {platform.python_version()}"
    lines = [f"`python benchmarks/reward_servers.py`, {arguments.scores} scores of each kind; {about}", ""]
    lines += ["| kind | way | ms per score |", "|---|---|---|"]
    lines += [f"| `{kind}` | {way} | {ms:.3f} |" for kind, way, ms in rows]
    print("\n".join(lines))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

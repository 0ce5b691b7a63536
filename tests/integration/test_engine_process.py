"""``evenhand engine`` as a process: ready line, clean stop, start-up faults in one sentence."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

READY_S = 20.0


@contextmanager
def engine(*options: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "evenhand.cli", "engine", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


FREE_PORTS = ("--port", "0", "--kv-events-port", "0", "--kv-replay-port", "0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_is_serves_and_stops_cleanly(number: signal.Signals) -> None:
    with engine("--name", "e3", "--model", "tiny", *FREE_PORTS) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready"
        assert ready["topic"] == "kv@e3@tiny"
        with urllib.request.urlopen(f"{ready['url']}/health", timeout=READY_S) as response:
            assert response.status == 200
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 2}).encode()
        with urllib.request.urlopen(f"{ready['url']}/v1/completions", body, timeout=READY_S) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 2
        process.send_signal(number)
        assert process.wait(READY_S) == 0


@pytest.mark.parametrize("option", ["--port", "--kv-events-port", "--kv-replay-port"])
def test_a_taken_port_is_one_sentence_and_a_failure(option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with engine(*FREE_PORTS, option, port) as process:
            _out, err = process.communicate(timeout=READY_S)
    assert process.returncode == 1
    lines = err.splitlines()
    assert len(lines) == 1
    assert f"127.0.0.1:{port}: Address" in lines[0]


def test_an_impossible_option_is_one_sentence_and_a_failure() -> None:
    with engine("--block-size", "-4") as process:
        _out, err = process.communicate(timeout=READY_S)
    assert process.returncode == 1
    assert err == "evenhand engine: block_size is -4, but must be at least 1.\n"

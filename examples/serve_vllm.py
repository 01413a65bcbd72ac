"""vLLM serves a model from quantkv's pages, unmodified; this starts the server, asks it as any client does, and stops it.

    python examples/serve_vllm.py                                   # without a GPU: SmolLM2, by scripts/vllm_cpu.sh
    python examples/serve_vllm.py --model MODEL --kv quantkv_tq4    # on a GPU, where `pip install '.[vllm]'` was run

It prints the command that starts the server, what the server says of its cache (how many tokens it holds), and the answers. Questions of
which any language model knows the answer are asked greedily; where the answer lacks it, the pages that it was read from are wrong: exit
code 1. The first run without a GPU downloads vLLM and PyTorch (docs/vllm.md says how much).
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "vllm_cpu.sh"
ASKED = {"The capital of France is": "Paris", "1, 2, 3, 4, 5, 6, 7,": "8, 9, 10"}
CACHE = re.compile(r"KV cache size: ([\d,]+) tokens")  # vLLM's own words


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(model, kv, port):
    """What starts the server: vLLM's own command line for a model on a GPU, without one the script that brings SmolLM2."""
    start = [str(SCRIPT), "serve"] if model is None else ["vllm", "serve", model]
    return [*start, "--kv-cache-dtype", kv, "--port", str(port)]


@contextmanager
def served(start, port, wait_s):
    """The server while it runs, as a function that says what it logged so far. RuntimeError if it ends, or does not answer in time."""
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(start, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

        def logged():
            log.seek(0)
            return log.read()

        try:
            stop = time.monotonic() + wait_s
            while not answers(port):
                if server.poll() is not None or time.monotonic() > stop:
                    raise RuntimeError(f"{' '.join(start)}: no answer; the end of its log:\n{logged()[-3000:]}")
                time.sleep(0.5)
            yield logged
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGINT)  # the engine is a process of its own
                try:
                    server.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(server.pid, signal.SIGKILL)
                    server.wait()


def answers(port):
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def ask(port, prompt, max_tokens=16):
    """The greedy continuation of `prompt`, by the API that OpenAI's clients speak as well."""
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["choices"][0]["text"]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as `vllm serve` takes it; SmolLM2-135M-Instruct on a CPU if left out")
    parser.add_argument("--kv", default="quantkv_int4", help="--kv-cache-dtype of the server: quantkv_ and the name of a format")
    parser.add_argument("--wait", type=int, default=900, help="seconds until the server must answer; the first run sets it up")
    options = parser.parse_args(arguments)
    port = free_port()
    start = command(options.model, options.kv, port)
    print(" ".join(start), flush=True)
    wrong = 0
    with served(start, port, options.wait) as logged:
        for prompt, known in ASKED.items():
            text = ask(port, prompt)
            wrong += known not in text
            print(f"{prompt!r} -> {text!r}" + ("" if known in text else f": {known!r} is not in it"), flush=True)
        lines = logged().splitlines()
    held = next((found[1] for line in lines if (found := CACHE.search(line))), "unknown")
    print(f"tokens that the cache holds: {held}")
    print(next((line[line.index("quantkv:") :] for line in lines if "quantkv:" in line), "vLLM's log does not name quantkv"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Engines of vLLM that live side by side, each in a process of its own that can be killed: one fills pages, another decodes from them."""

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine

FIRST_PORT = 23000 + os.getpid() % 20000  # of the side channels


class Peer:
    """An engine with these arguments of vLLM's `LLM`, and NIXL between it and its peers.

    It answers one request at a time (`ask`). log: what it printed. environment: variables for it. buffers: the memory that NIXL sends
    from, "cpu" or "cuda". prepare: called in its process before the engine is made.
    """

    count = 0

    def __init__(
        self,
        model: str,
        kv_cache_dtype: str,
        folder: Path,
        environment: Any = None,
        policy: str = "recompute",
        buffers: str = "cpu",
        prepare: Callable[[], None] | None = None,
        **arguments: Any,
    ):
        Peer.count += 1
        self._log = folder / f"engine {Peer.count}.log"
        here, there = socket.socketpair()
        port = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(FIRST_PORT + Peer.count)}
        connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": buffers, "kv_load_failure_policy": policy}
        given = {**engine.COMMON, "max_num_seqs": 1, "num_gpu_blocks_override": 64, "kv_transfer_config": connector, **arguments}
        self.process = os.fork()
        if self.process == 0:
            try:
                here.close()
                with self._log.open("w") as file:
                    engine._print_to(file)
                    try:
                        os.environ.update({**port, **(environment or {})})
                        if prepare is not None:
                            prepare()
                        _serve(there, model, kv_cache_dtype, given)
                    except BaseException:
                        traceback.print_exc(file=file)
                        file.flush()
            finally:
                os._exit(0)
        there.close()
        self._socket = here.makefile("rw", encoding="utf-8")
        here.close()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ready(self) -> "Peer":
        """Itself, when the engine has started."""
        self._answer()
        return self

    def ask(self, prompt: list[int], tokens: int, params: Any = None) -> dict[str, Any]:
        """Continue a prompt greedily: tokens, logprobs, cached, finish (why it ended), params (where its pages are), metrics of NIXL."""
        self._socket.write(json.dumps([prompt, tokens, params]) + "\n")
        self._socket.flush()
        return self._answer()

    def fill(self, prompt: list[int]) -> dict[str, Any]:
        """Compute a prompt's pages and keep them for a peer -> what a peer is told of them."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        params |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        return self.ask(prompt, 1, params)["params"]

    def _answer(self) -> Any:
        line = self._socket.readline()
        if not line:
            raise RuntimeError(f"the engine's process ended:\n{self.log[-6000:]}")
        return json.loads(line)

    def stop(self) -> None:
        """Let nothing of it run until it is killed."""
        os.kill(self.process, signal.SIGSTOP)

    def kill(self) -> None:
        """It does not come to say goodbye."""
        if self.process is not None:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
            self.process = None
            self._socket.close()


def _serve(asked: socket.socket, model: str, kv_cache_dtype: str, arguments: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model, kv_cache_dtype=kv_cache_dtype, **arguments)
    stream = asked.makefile("rw", encoding="utf-8")

    def say(what: Any) -> None:
        stream.write(json.dumps(what) + "\n")
        stream.flush()

    say("ready")
    for line in stream:
        prompt, tokens, params = json.loads(line)
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False, extra_args=extra)
        begun = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        said = output.outputs[0]
        metrics = {metric.name: getattr(metric, "value", getattr(metric, "sum", None)) for metric in llm.get_metrics()}
        say(
            {
                "tokens": list(said.token_ids),
                "logprobs": [step[t].logprob for t, step in zip(said.token_ids, said.logprobs or [])],
                "cached": output.num_cached_tokens,
                "finish": said.finish_reason,
                "params": output.kv_transfer_params,
                "seconds": time.perf_counter() - begun,
                "metrics": {name: value for name, value in metrics.items() if "nixl" in name or "external" in name},
            }
        )

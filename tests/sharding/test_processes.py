"""Several processes on loopback: the tokens of one process; every way to end; and the parts they are made of."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from golden_cases import read
from golden_configs import qwen3_config
from tiny_models import write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import EngineConfig
from jaxinfer.core import PlanRow, PromptLogprobs, Request, StepPlan, StepResult
from jaxinfer.engine.links import pack_result, unpack_result
from jaxinfer.engine.lockstep import (
    Follower,
    Leader,
    check_equal,
    open_lockstep,
    pack_state,
    settings,
    unpack_requests,
)
from jaxinfer.engine.requests import RequestFactory
from jaxinfer.engine.runner import InFlight
from jaxinfer.engine.state import RequestState
from jaxinfer.loaders import open_checkpoint
from jaxinfer.models import parse_config
from jaxinfer.sharding import mesh as meshes
from jaxinfer.sharding.processes import Place, Processes, find_place, gather, join
from jaxinfer.sharding.transport import GONE_SECONDS, Connection, Relay, dial, listen, reserve, split_address

ROOT = Path(__file__).parents[2]
SMALL = {"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 8, "compile_cache": None}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


# -- processes of their own --------------------------------------------------------------------------


def free_port() -> int:
    """Below those that systems give to whoever asks for any, so that it stays free until a process listens there."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def run(commands: list[list[str]], *, num_devices: int = 1) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of processes that run together, each with that many fake devices."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
    }
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, text=True, **pipes)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=500) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def run_script(script: str, *arguments: str, count: int = 2, num_devices: int = 1) -> list[tuple[int, str, str]]:
    """A script that each process runs with the coordinator, their number and its own as its first arguments."""
    where = f"127.0.0.1:{free_port()}"
    start = "import sys\nwhere, count, me = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])\n"
    commands = [["-c", start + script, where, str(count), str(number), *arguments] for number in range(count)]
    return run(commands, num_devices=num_devices)


def run_command(command: str, *flags: str, count: int = 2, num_devices: int) -> list[tuple[int, str, str]]:
    """`python -m jaxinfer.COMMAND` in several processes. What only process 0 needs is "0:FLAG"."""
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(count), "--process-id"]
    commands = []
    for number in range(count):
        own = [flag.removeprefix("0:") for flag in flags if number == 0 or not flag.startswith("0:")]
        commands.append(["-m", *f"jaxinfer.{command}".split(), *where, str(number), *own])
    return run(commands, num_devices=num_devices)


generate = partial(run_command, "generate")


def write_prompts(path: Path, prompts: list[list[int]]) -> str:
    path.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    return str(path)


def token_ids(output: str) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in output.splitlines()]


@pytest.mark.parametrize(("mesh", "num_devices"), [("tensor=4", 2), ("pipe=2 --pipe-layers 1,1", 1)])
def test_two_processes_give_the_tokens_of_one(mesh, num_devices, tmp_path, monkeypatch):
    """Half of every layer each, or half of the layers. Process 1 is given no prompts, and prints nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    golden, _ = read("qwen3_gqa")
    folder = write_model(tmp_path / "m", golden["config"], seed=golden["seed"], with_tokenizer=False)
    prompts = write_prompts(tmp_path / "prompts.jsonl", [golden["input_ids"]])
    flags = ["--model", str(folder), "--mesh", *mesh.split(), "--max-num-seqs", "1", "--max-num-batched-tokens", "40"]
    flags += ["--no-prefix-caching", "--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--json"]
    (code, out, err), other = generate(*flags, "0:--prompts-file", f"0:{prompts}", num_devices=num_devices)
    assert code == 0, err
    assert token_ids(out) == [golden["greedy_ids"][:6]]
    assert other[:2] == (0, ""), other


@pytest.mark.slow
def test_two_processes_are_measured_as_one_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = write_model(tmp_path / "m", seed=4, num_hidden_layers=3, with_tokenizer=False)
    flags = ["--model", str(folder), "--mesh", "pipe=2", "--pipe-layers", "1,2"]
    flags += ["--num-blocks", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "16"]
    flags += ["--batch-size", "2", "--input-len", "5", "--output-len", "4", "--iterations", "2"]
    (code, out, err), other = run_command("bench latency", *flags, "0:--json", "0:-", num_devices=1)
    assert code == 0, err
    report = json.loads(out)
    assert (report["device"]["count"], report["model"]["num_layers"]) == (2, 3)
    throughput = report["measured"]["throughput"]
    assert (throughput["num_requests"], throughput["num_output_tokens"], throughput["num_failed"]) == (4, 16, 0)
    assert other[:2] == (0, ""), other


KILLED = """
import os, signal
from jaxinfer.sharding.processes import connect_processes
processes = connect_processes(where, count, me)
processes.exchange(me)
if sys.argv[4] == str(me):
    os.kill(os.getpid(), signal.SIGKILL)
processes.exchange(me)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other(victim):
    results = run_script(KILLED, str(victim))
    assert results[victim][0] == -signal.SIGKILL
    code, out, err = results[1 - victim]
    assert (code, out) == (1, "")
    assert re.fullmatch(rf"process {victim} of 2 \(.*\) is gone: the run ends\n", err)


def test_mistakes_end_all_processes_with_code_2(tmp_path):
    """One that all find by themselves, and one that process 1 cannot know of."""
    folder = write_model(tmp_path / "m")
    for _, out, err in (results := generate("--model", str(folder), "--mesh", "tensor=2", "0:--prompt", "0:x",
                                            num_devices=2)):  # fmt: skip
        assert out == ""
        assert err.count("\n") == 1
        assert "the mesh of 2 devices has none of process 1: each of the 2 needs a part, as in tensor=4" in err
    assert [code for code, _, _ in results] == [2, 2]
    missing = str(tmp_path / "none")
    flags = ["--model", str(folder), "--mesh", "tensor=4", "0:--prompts-file", f"0:{missing}"]
    results = generate(*flags, num_devices=2)
    assert [code for code, _, _ in results] == [2, 2]
    for _, _, err in results:
        assert f"--prompts-file {missing}: " in err
        assert err.count("\n") == 1


MIXED = """
import json
from jaxinfer import LLM, SamplingParams
from jaxinfer.loaders.safetensors_folder import SafetensorsFolder
from jaxinfer.sharding.processes import connect_processes

num_read, original = 0, SafetensorsFolder.read
def record(self, name, index):
    global num_read
    part = original(self, name, index)
    num_read += part.size * (".layers." in name)
    return part
SafetensorsFolder.read = record

def listed(outputs):
    for output in outputs:
        for position in [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]:
            yield from (position or {}).values()

connect_processes(where, count, me)
folder, mesh, prompts, params, settings = sys.argv[4], sys.argv[5], *map(json.loads, sys.argv[6:])
try:
    with LLM(folder, mesh=mesh, **settings) as llm:
        kept = llm.stream(prompts[0], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
        next(kept)
        outputs = llm.generate(prompts, [SamplingParams(**one) for one in params])
        kept.close()
        again = llm.generate(prompts[0], SamplingParams(**params[0]))
        assert llm.stats()["num_requests_running"] == 0
        print("\\nanswers", json.dumps([[answer.token_ids for answer in one.outputs] for one in [*outputs, *again]]))
        print("\\nlogprobs", json.dumps([one.logprob for one in listed(outputs)]))
finally:
    print("\\nread", num_read, flush=True)
"""

PARAMS = [
    {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True},
    {"temperature": 0.9, "max_tokens": 12, "n": 2},
    {"temperature": 0.9, "seed": 3, "top_k": 9, "top_p": 0.9, "logprobs": 2, "max_tokens": 12},
    {"temperature": 0.0, "presence_penalty": 0.6, "logit_bias": {"7": 2.0}, "prompt_logprobs": 1, "max_tokens": 12},
    {"temperature": 1.3, "stop": ["a", "e"], "max_tokens": 40},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "num_devices", "mesh", "more"),
    [
        (2, 4, "tensor=8", {}),
        (4, 1, "tensor=4", {}),
        (2, 2, "tensor=4", {"load_format": "dummy"}),
        (2, 2, "pipe=2,tensor=2", {"warmup": "full"}),
        (2, 2, "pipe=4", {}),
    ],
)
def test_every_way_to_sample(count, num_devices, mesh, more, tmp_path):
    """Streams, drops, siblings, both samplers, stop strings, prefix hits: one process' tokens; each reads its part."""
    num_layers = 1 if mesh.startswith("tensor") else 2 if "tensor" in mesh else 4
    config = qwen3_config(num_attention_heads=8, num_key_value_heads=8, vocab_size=260, num_hidden_layers=num_layers)
    folder = write_model(tmp_path / "m", config, seed=9)
    prompts = [[*range(20, 40), number] for number in range(len(PARAMS))]
    options = {**SMALL, "num_blocks": 40, "max_model_len": 200, **more}
    arguments = [str(folder), mesh, *map(json.dumps, (prompts, PARAMS, options))]
    results = run_script(MIXED, *arguments, count=count, num_devices=num_devices)
    for code, _, err in results:
        assert code == 0, err
    with LLM(str(folder), mesh=mesh, **options) as llm:
        next(kept := llm.stream(prompts[0], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)))
        outputs = llm.generate(prompts, [SamplingParams(**one) for one in PARAMS])
        kept.close()
        outputs += llm.generate(prompts[0], SamplingParams(**PARAMS[0]))
    ours = ("answers ", "logprobs ", "read ")  # and not Gloo's lines, which it may tear
    lines = [dict(line.split(" ", 1) for line in out.splitlines() if line.startswith(ours)) for _, out, _ in results]
    assert json.loads(lines[0]["answers"]) == [[answer.token_ids for answer in one.outputs] for one in outputs]
    assert all("answers" not in other for other in lines[1:])
    positions = [each for one in outputs for each in [*(one.prompt_logprobs or ()), *(one.outputs[0].logprobs or ())]]
    expected = [entry.logprob for position in positions for entry in (position or {}).values()]
    assert len(expected) > 40
    assert json.loads(lines[0]["logprobs"]) == pytest.approx(expected, abs=1e-5)
    checkpoint = open_checkpoint(str(folder))
    whole = sum(int(np.prod(checkpoint.shape(name))) for name in checkpoint.tensor_names() if ".layers." in name)
    most = 0 if "load_format" in more else whole * (1 / count + 0.02)  # norms lie everywhere
    assert all(int(other["read"]) <= most for other in lines)


DYING = """
import os, signal
from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.sharding.processes import connect_processes

connect_processes(where, count, me)
folder, victim, how = sys.argv[4:]
num_steps, original = 0, Engine._step
def step(self):
    global num_steps
    num_steps += 1
    if num_steps == 4 and me == int(victim):
        if how == "fails":
            raise RuntimeError("made to fail")
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self)
Engine._step = step
llm = LLM(folder, mesh="tensor=2", max_num_seqs=1, max_num_batched_tokens=8, max_model_len=64, compile_cache=None)
llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
print("answered")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "fails"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_or_fails_in_a_step(victim, how, tmp_path):
    """The other is in a collective that is never complete."""
    folder = write_model(tmp_path / "m", num_hidden_layers=1)
    results = run_script(DYING, str(folder), str(victim), how)
    assert [code for code, _, _ in results] == [-9 if how == "dies" and number == victim else 1 for number in (0, 1)]
    expected = "is gone: the run ends" if how == "dies" else ": RuntimeError: made to fail"
    for number, (_, out, err) in enumerate(results):
        assert "answered" not in out
        if not (how == "dies" and number == victim):
            assert re.fullmatch(rf"process {victim} of 2 \(.*\){expected if how == 'fails' else ' ' + expected}\n", err)


# -- lockstep ----------------------------------------------------------------------------------------


@pytest.fixture
def ends():
    """Two ends of a stream."""
    with listen(0, "127.0.0.1") as server:
        one = socket.create_connection(server.getsockname())
        other = server.accept()[0]
    with one, other:
        yield one, other


@pytest.fixture
def runs(ends, monkeypatch):
    """Both processes of a run, within this one, which does not end with them."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    hosts = {0: "here", 1: "there"}
    runs = [Processes(index, 2, {1 - index: Connection(ends[index])}, hosts) for index in (0, 1)]
    yield runs
    runs[1].leave()
    runs[0].leave()


class NoRunner:
    """A device that samples a hash of (request, position): nothing is compiled."""

    def __init__(self, engine) -> None:
        runner = engine.runner
        self.stages, self.ladder, self.decode_steps = runner.stages, runner.ladder, runner.decode_steps

    def dispatch_burst(self, plans) -> list[InFlight]:
        return [InFlight(plan, None) for plan in plans]

    def fetch(self, step) -> StepResult:
        plan = step.plan
        decodes = [self._sample(plan.decodes.row(number)) for number in range(len(plan.decodes))]
        others = [[self._sample(row)] if row.samples else [] for row in plan.others]
        return StepResult(others, decode_token_ids=np.array(decodes, np.int64))

    @staticmethod
    def _sample(row) -> int:
        return zlib.crc32(f"{row.request.arrival} {row.start + row.num_tokens}".encode()) % 256


def without_device(engine, ended: dict[int, tuple]):
    """An engine that computes nothing, and notes what becomes of its requests."""
    engine.runner, close = NoRunner(engine), engine._close
    engine._compile_reachable = lambda: None

    def note(answer) -> None:
        request = answer.request
        ended[request.arrival] = request.token_ids, request.finish_reason, request.stop_reason
        close(answer)

    engine._close = note
    return engine


LOCKSTEP_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=1.0, max_tokens=15, n=2),
    SamplingParams(max_tokens=25, stop=[*"abcdefgh"]),
    SamplingParams(max_tokens=30, top_k=7, logit_bias={3: 1.5}, stop_token_ids=[9, 8, 77]),
]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_follower_does_what_the_leader_does(policy, depth, tmp_path, runs):
    """Requests, blocks and known prefixes are the same at the end, through preemptions, aborts, drops and resets."""
    folder = write_model(tmp_path / "m", num_hidden_layers=1)
    sizes = {"max_num_seqs": 12, "max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 26, "max_model_len": 80}
    config = EngineConfig(model=str(folder), policy=policy, depth=depth, compile_cache=None, **sizes)
    ended: list[dict[int, tuple]] = [{}, {}]
    leader = without_device(Leader(runs[0], config), ended[0])
    follower = without_device(Follower(runs[1], config), ended[1])
    thread = threading.Thread(target=follower.follow, daemon=True)
    thread.start()
    rng, states = random.Random(depth), []
    for turn in range(400):
        if turn % 5 == 0 and turn < 300:
            for _ in range(rng.randrange(3)):
                prompt = [*range(rng.choice([3, 12, 30])), rng.randrange(4)]
                params, number = LOCKSTEP_PARAMS[rng.randrange(4)], len(states)
                states.append(leader.make(prompt, params, is_streaming=number % 4 == 0, priority=rng.randrange(3)))
                leader.submit(states[-1:])
        leader.step()
        if states and rng.random() < 0.05:
            rng.choice([leader.abort, leader.abandon])(rng.choice(states))
        if rng.random() < 0.01:
            leader.reset_prefix_cache()
    leader.abort_all("enough")
    while leader.step():
        pass
    assert leader.stats().num_preemptions > 0
    leader.close()
    thread.join()
    with pytest.raises(RuntimeError, match="the other processes have left: this engine is closed"):
        leader.submit([])
    assert {reason for _, reason, _ in ended[0].values()} >= {"length", "stop", "abort"}
    assert len(ended[0]) > len(states) > 50
    assert ended[0] == ended[1]
    caches = leader._cache, follower._cache
    assert [*caches[0].pool.free_blocks()] == [*caches[1].pool.free_blocks()]
    assert caches[0].index._entries == caches[1].index._entries
    assert len(caches[0].index) > 0


def test_results_are_told_whole():
    """What a step gave, with log-probabilities of outputs and of a prompt, reaches a process without the last stage."""
    one, other = (Request(name, [1, 2, 3], SamplingParams(), 4, arrival=0) for name in "ab")
    rows = [PlanRow(request, slot, 0, 0, 2) for slot, request in enumerate((one, other))]
    plan = StepPlan(others=rows, num_tokens=4)
    row = (-0.1, 1, np.array([4, 5], np.int32), np.array([-0.1, -np.inf], np.float32))
    result = StepResult(
        [[7], None],
        logprobs=[row, row],
        prompt_logprobs=[PromptLogprobs(other, 1, [row])],
        decode_token_ids=np.array([3, -1]),
    )
    told = unpack_result(json.loads(json.dumps(pack_result(result, plan))), plan)
    assert told.token_ids == result.token_ids
    assert told.decode_token_ids.tolist() == [3, -1]
    assert [(part.request, part.start) for part in told.prompt_logprobs] == [(other, 1)]
    assert told.logprobs is not None
    for logprob, rank, ids, values in (*told.logprobs, *told.prompt_logprobs[0].rows):
        assert (logprob, rank, ids) == (-0.1, 1, [4, 5])
        np.testing.assert_array_equal(np.float32(values), row[3])


def test_requests_are_told_whole(ends):
    """Every field but those that a run fills."""
    model = parse_config(qwen3_config())
    factory = RequestFactory(model, None, 64, seed=1)
    params = SamplingParams(
        n=2, temperature=np.float32(0.7), top_k=np.int64(5), logit_bias={7: 1, 200: -0.1}, seed=2**64 - 1,
        stop_token_ids=[5, 3], allowed_token_ids=[3, 5, 7], logprobs=1, max_tokens=9,
    )  # fmt: skip
    requests, _ = factory.make({"prompt_token_ids": np.arange(5), "cache_salt": "ö"}, params, priority=np.int32(-3))
    requests[0].bad_word_ids = ((1, 2), (3,))
    state = RequestState(requests, "text", None, is_streaming=True)
    Connection(ends[0]).send(pack_state(state))
    received = Connection(ends[1]).receive()
    assert received is not None
    copies = unpack_requests(received)
    for one, other in zip(requests, copies, strict=True):
        for field in dataclasses.fields(Request):
            if field.name not in ("leader", "params"):
                assert getattr(other, field.name) == getattr(one, field.name), field.name
        for field in dataclasses.fields(SamplingParams):
            assert getattr(other.params, field.name) == getattr(one.params, field.name), field.name
    assert [copy.leader for copy in copies] == [None, copies[0]]
    assert copies[0].is_watched


def test_a_run_has_one_engine(runs):
    runs[0].has_engine = True
    with pytest.raises(ValueError, match="a run of several processes has one engine, and this is the second"):
        open_lockstep(runs[0], EngineConfig())


def test_settings_have_to_be_equal():
    own = settings(EngineConfig(model="a", max_num_seqs=4))
    check_equal([own, settings(EngineConfig(model="b", max_num_seqs=4))])
    with pytest.raises(ValueError, match="process 2 has max_num_seqs 8, process 0 has 4"):
        check_equal([own, own, settings(EngineConfig(max_num_seqs=8))])


# -- meeting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coordinator", "count", "index", "message"),
    [
        ("host", 2, 0, "coordinator must be HOST:PORT or 'auto', got 'host'"),
        (":99", 2, 0, "got ':99'"),
        ("host:0", 2, 0, "got 'host:0'"),
        ("host:66000", 2, 0, "got 'host:66000'"),
        ("host:99", None, 0, "coordinator host:99 needs num_processes too"),
        ("host:99", 2, None, "coordinator host:99 needs process_id too"),
        ("host:99", 0, 0, "num_processes must be at least 1, got 0"),
        ("host:99", 2, 2, "process_id must be between 0 and 1, got 2"),
        ("host:99", 2, -1, "process_id must be between 0 and 1, got -1"),
        ("host:99", 2, True, "process_id must be an integer, got True"),
        ("auto", 2, None, "coordinator 'auto' finds num_processes and process_id by itself"),
        ("auto", None, None, "coordinator 'auto': there is no Slurm, Open MPI, Kubernetes or Cloud TPU"),
    ],
)
def test_arguments_are_checked(coordinator, count, index, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        find_place(coordinator, count, index, timeout=1)


def test_a_cluster_says_where_processes_meet(monkeypatch):
    """As Slurm's srun sets it: the host of the first task, and a port that follows from the job."""
    names = {"JOB_ID": "7", "STEP_NODELIST": "node[3-4]", "NTASKS": "16", "PROCID": "9", "LOCALID": "1"}
    for name, value in names.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert find_place("auto", None, None, timeout=1) == Place("node3", 61447, 16, 9, [1])


def test_addresses():
    assert split_address("host.name:99") == ("host.name", 99)
    assert split_address("[::1]:65535") == ("::1", 65535)


def meet(
    port: int, places: list[tuple[int, int]], seconds: float = 10.0, before_last: Callable[[], None] = lambda: None
) -> dict[int, object]:
    """What each of (number, count) gets from meeting: hosts, or what it raised."""
    opened: list[Connection] = []
    results: dict[int, object] = {}

    def enter(key: int, index: int, count: int) -> None:
        place, deadline = Place("127.0.0.1", port, count, index), time.monotonic() + seconds
        try:
            peers, results[key], *_ = gather(place, deadline, 1) if index == 0 else join(place, deadline)
        except (ValueError, ConnectionError) as error:
            results[key] = error
            return
        opened.extend(peers.values())

    threads = [threading.Thread(target=enter, args=(key, *place)) for key, place in enumerate(places)]
    for thread in threads:
        if thread is threads[-1]:
            before_last()
        thread.start()
    for thread in threads:
        thread.join()
    for end in opened:
        end.close()
    return results


def test_processes_meet():
    """In any order, with a stranger among them."""
    port, host = free_port(), socket.gethostname()

    def disturb() -> None:
        with dial("127.0.0.1", port, time.monotonic() + 10) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")

    results = meet(port, [(2, 3), (0, 3), (1, 3)], before_last=disturb)
    assert results == {0: {0: host, 2: host}, 1: {0: host, 1: host, 2: host}, 2: {0: host, 1: host}}


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(0, 2), (1, 3)], r"process 1 \(.*\) is one of 3 processes, process 0 one of 2"),
        ([(0, 3), (1, 3), (1, 3)], "two processes are process 1 of 3, one of them on .*"),
    ],
)
def test_processes_that_do_not_fit_are_refused_everywhere(places, message):
    for error in meet(free_port(), places).values():
        assert isinstance(error, ValueError)
        assert re.fullmatch(message, str(error))


def test_a_process_that_does_not_come():
    results = meet(free_port(), [(0, 3), (2, 3)], seconds=1.0)
    assert str(results[0]) == "of 3 processes, 1 did not come within 1 seconds"
    assert isinstance(results[1], ConnectionError)  # either's clock is first
    port = free_port()
    alone = meet(port, [(1, 2)], seconds=0.3)[0]
    assert isinstance(alone, ConnectionError)
    assert f"process 0 did not answer at 127.0.0.1:{port} within 0 seconds" in str(alone)
    with listen(port), pytest.raises(ValueError, match=f"cannot listen at port {port}: Address already in use"):
        gather(Place("127.0.0.1", port, 2, 0), time.monotonic() + 1, 1)


def test_values_are_exchanged(runs):
    results: list[list] = [[], []]

    def work(number: int) -> None:
        results[number] = [runs[number].exchange({"value": number + turn}) for turn in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == [[{"value": turn}, {"value": turn + 1}] for turn in range(5)]


# -- transport ---------------------------------------------------------------------------------------


def test_messages_of_every_size(ends):
    one, other = map(Connection, ends)
    messages = [{}, {"op": "x" * 5_000_000}, {"list": [1, 2.5, None, "ö"]}]
    sender = threading.Thread(target=lambda: [one.send(message) for message in messages])
    sender.start()
    assert [other.receive() for _ in messages] == messages
    sender.join()
    with pytest.raises(TimeoutError):
        other.receive(0.01)
    one.close()
    assert other.receive() is None
    with pytest.raises(OSError):
        [other.send({"op": "x"}) for _ in range(1000)]


def test_a_vanished_host_is_noticed(ends):
    """By the system: it asks again and again, and gives up after `GONE_SECONDS`."""
    one = ends[0]
    Connection(one)
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    idle, interval, count = (one.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert idle + interval * count == GONE_SECONDS
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * GONE_SECONDS


def test_a_reserved_port_is_nobody_elses_until_it_is_given_back():
    """jax's coordination service listens there all the same: `test_two_processes_give_the_tokens_of_one`."""
    with reserve() as reserved:
        port = reserved.getsockname()[1]
        for host in ("", "127.0.0.1"):
            with pytest.raises(ValueError, match=f"cannot listen at port {port}: Address already in use"):
                listen(port, host)
        with socket.socket() as caller, pytest.raises(OSError, match="in use"):
            caller.bind(("127.0.0.1", port))
    listen(port).close()


@pytest.mark.parametrize("data", [b"\x00", b"\xff" * 8, b"\x00" * 7 + b"\x02{]", b"\x00" * 7 + b"\x0212"])
def test_what_is_no_message_is_an_end(data, ends):
    one, other = ends
    one.sendall(data)
    one.close()
    assert Connection(other).receive() is None


def test_a_relay_passes_bytes_and_keeps_a_break_to_itself():
    with listen(0, "127.0.0.1") as far:
        relay = Relay("127.0.0.1", far.getsockname()[1])
        with socket.create_connection(("127.0.0.1", relay.port), timeout=10) as near:
            with far.accept()[0] as end:
                near.sendall(b"ping")
                assert end.recv(4) == b"ping"
                end.sendall(b"pong")
                assert near.recv(4) == b"pong"
            near.settimeout(0.3)
            with pytest.raises(TimeoutError):
                near.recv(1)
        near = socket.create_connection(("127.0.0.1", relay.port), timeout=10)
        with far.accept()[0] as end:
            near.close()
            assert end.recv(1) == b""
        relay.close()


# -- meshes ------------------------------------------------------------------------------------------


def test_jax_connected_by_itself_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"processes\.connect_processes, not jax\.distributed"):
        LLM("smollm2")


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (None, "2 processes need a mesh over their devices, such as tensor=8"),
        ("data=2,tensor=4", "mesh axis data=2 over 2 processes is not supported: replicas exchange nothing"),
        ("tensor=4", "the mesh of 4 devices has none of process 1: each of the 2 needs a part, as in tensor=8"),
    ],
)
def test_meshes_that_several_processes_cannot_run(mesh, message, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=re.escape(message)):
        meshes.resolve_mesh(mesh)

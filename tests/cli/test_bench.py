"""`python -m jaxinfer.bench`: every subcommand to its end, its JSON, mistakes, and how requests are timed."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import contextmanager

import pytest
from tiny_models import VOCAB, write_model

from jaxinfer import arguments, bench, measure
from jaxinfer.core import SamplingParams
from jaxinfer.metrics.roofline import Roof
from jaxinfer.metrics.workload import Job, draw_fixed

MEASURE_ROOF = measure._measure_roof


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("bench") / "model", seed=4, num_hidden_layers=1)


@pytest.fixture(autouse=True)
def surroundings(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("prepare_backend", "keep_modules"):  # they change the whole process
        monkeypatch.setattr(bench, name, lambda *_: None)
    monkeypatch.setattr(measure, "_measure_roof", lambda: Roof(1e12, 1e15, "measured"))


@pytest.fixture
def flags(folder):
    return ["--model", str(folder), "--num-blocks", "128", "--max-num-seqs", "3", "--max-num-batched-tokens", "16"]


def call(command, flags, *more) -> int:
    try:
        return bench.main([command, *flags, *more])
    except SystemExit as stop:
        return int(stop.code or 0)


SIZES = ["--num-prompts", "3", "--input-len", "5", "--output-len", "4"]
NUMBER, TEXT = (int, float), str
SUMMARY = dict.fromkeys(("count", "mean", "min", "p50", "p90", "p95", "p99", "max"), NUMBER)
THROUGHPUT = dict.fromkeys(
    (
        "num_requests",
        "num_failed",
        "num_prompt_tokens",
        "num_output_tokens",
        "seconds",
        "output_tokens_per_second",
        "total_tokens_per_second",
        "requests_per_second",
    ),
    NUMBER,
)
LATENCIES = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"), SUMMARY)
SHARES = dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), NUMBER)
COST = ("seconds", "memory_bound_seconds", "num_steps", "weight_bytes", "kv_bytes", "logits_bytes", "operations")
SCHEMA = {
    "command": TEXT,
    "date": TEXT,
    "versions": dict.fromkeys(("jaxinfer", "jax", "python", "platform", "runtime"), TEXT),
    "device": {"platform": TEXT, "kind": TEXT, "count": int},
    "model": {"name": TEXT, "architecture": TEXT, "dtype": TEXT, "num_parameters": int, "num_layers": int},
    "engine": {"kernels": TEXT, "depth": int, "load_seconds": float, "num_programs": int, "compile_seconds": float},
    "memory_bytes": {"weights": int, "KV cache": int},
    "workload": {"name": TEXT, "temperature": float},
    "measured": {
        "throughput": THROUGHPUT,
        **LATENCIES,
        "seconds": float,
        "counts": dict.fromkeys(measure.COUNTERS, int),
        "errors": list,
    },
    "roof": {"bandwidth": float, "peak": float, "source": TEXT},
    "floor": {"throughput": THROUGHPUT, **LATENCIES, "cost": dict.fromkeys(COST, NUMBER)},
    "share_of_floor": {
        **dict.fromkeys(("output_tokens_per_second", "total_tokens_per_second", "requests_per_second"), NUMBER),
        **dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"), SHARES),
    },
}
"""Keys that every report has, with their kinds."""


def check_schema(value, schema, path="report"):
    if not isinstance(schema, dict):
        assert isinstance(value, schema), f"{path} is {value!r}"
        assert not isinstance(value, float) or math.isfinite(value), path
        return
    assert isinstance(value, dict), path
    for name, kind in schema.items():
        assert name in value, f"{path} has no {name}"
        check_schema(value[name], kind, f"{path}.{name}")


def report_of(command, flags, capsys, *more) -> dict:
    assert call(command, flags, *more, "--json", "-") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    check_schema(report, SCHEMA)
    assert report["command"] == command
    assert "TTFT" in err  # the tables make room for JSON
    assert report["measured"]["counts"]["prefix_cache_hits"] == 0
    assert report["measured"]["counts"]["num_programs"] == 0
    return report


def test_throughput(flags, capsys):
    report = report_of("throughput", flags, capsys, *SIZES)
    expected = {"name": "fixed", "num_prompts": 3, "input_len": 5, "output_len": 4, "seed": 0, "temperature": 0.6}
    assert report["workload"] == expected
    got = report["measured"]["throughput"]
    assert (got["num_requests"], got["num_prompt_tokens"], got["num_output_tokens"]) == (3, 15, 12)
    assert got["output_tokens_per_second"] == pytest.approx(12 / got["seconds"])
    assert got["seconds"] == report["measured"]["seconds"]
    assert report["share_of_floor"]["output_tokens_per_second"] == pytest.approx(
        got["output_tokens_per_second"] / report["floor"]["throughput"]["output_tokens_per_second"]
    )
    assert report["measured"]["itl_ms"]["count"] == 9
    assert report["measured"]["counts"]["num_steps"] == 4
    assert report["floor"]["cost"]["num_steps"] == 4
    assert report["objectives_ms"] is None


def test_nano_bench(flags, capsys):
    """The workload by its name, cut to one request; its lengths are those of seed 0."""
    report = report_of("throughput", flags, capsys, "--workload", "nano", "--num-prompts", "1")
    job = bench.draw_nano(VOCAB, 1)[0]
    got = report["measured"]["throughput"]
    assert (got["num_prompt_tokens"], got["num_output_tokens"]) == (job.prompt_len, job.output_len)


def test_latency(flags, capsys):
    more = ["--batch-size", "2", "--input-len", "5", "--output-len", "4", "--iterations", "3"]
    report = report_of("latency", flags, capsys, *more)
    measured, floor = report["measured"], report["floor"]
    assert [measured[f"{name}_ms"]["count"] for name in ("ttft", "tpot", "itl", "e2e")] == [6, 6, 18, 6]
    assert floor["ttft_ms"]["count"] == 2  # of one batch
    assert measured["throughput"]["num_output_tokens"] == 24
    ttft, e2e = measured["ttft_ms"], measured["e2e_ms"]
    assert 0 < ttft["p50"] <= ttft["p90"] <= ttft["p95"] <= ttft["p99"] <= e2e["max"]
    assert report["share_of_floor"]["ttft_ms"]["p50"] == pytest.approx(floor["ttft_ms"]["p50"] / ttft["p50"])


def test_load_at_a_rate(flags, capsys):
    report = report_of("load", flags, capsys, *SIZES, "--request-rate", "100", "--slo", "ttft:60000,e2e:60000")
    assert report["workload"]["request_rate"] == 100
    assert report["objectives_ms"] == {"ttft": 60000, "e2e": 60000}
    goodput, throughput = report["measured"]["goodput"], report["measured"]["throughput"]
    assert (goodput["num_good"], goodput["attainment"]) == (3, 1.0)
    assert goodput["requests_per_second"] == pytest.approx(throughput["requests_per_second"])


def test_load_at_once_misses_a_hard_objective(flags, capsys):
    report = report_of("load", flags, capsys, *SIZES, "--request-rate", "inf", "--slo", "ttft:1e-6")
    assert report["workload"]["request_rate"] == "inf"
    assert report["measured"]["goodput"] == {"num_good": 0, "requests_per_second": 0.0, "attainment": 0.0}


def test_load_by_a_trace(flags, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"input_len": 9, "output_len": 2, "arrival": 0.02},
        {"prompt_token_ids": [5, 6, 7], "output_len": 3, "arrival": 0},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    report = report_of("load", flags, capsys, "--trace", str(trace))
    assert report["workload"]["arrivals"] == "trace"
    assert report["measured"]["throughput"]["num_output_tokens"] == 5
    assert report["measured"]["goodput"] is None
    assert report["floor"]["throughput"]["seconds"] > 0.02
    first = report_of("throughput", flags, capsys, "--trace", str(trace), "--num-prompts", "1")
    assert first["measured"]["throughput"]["num_prompt_tokens"] == 9
    assert first["floor"]["throughput"]["seconds"] < 0.02  # its arrival does not count


def test_tables(flags, tmp_path, capsys):
    """To stdout, with versions, device, floor and share; JSON to a file beside them."""
    path = tmp_path / "result.json"
    assert call("load", flags, *SIZES, "--request-rate", "inf", "--slo", "tpot:50", "--json", str(path)) == 0
    out = capsys.readouterr().out
    for text in (
        *("TTFT", "TPOT", "ITL", "E2E", "p50", "p90", "p95", "p99", "floor", "share"),
        *("output tokens", "good requests (tpot <= 50 ms)", "attainment", "100.0%"),
        *("jaxinfer 0", "jax 0", "python 3", "cpu", "LlamaForCausalLM", "kernels reference", "GB/s", "TFLOP/s"),
    ):
        assert text in out, text
    check_schema(json.loads(path.read_text()), SCHEMA)


def test_profile(flags, tmp_path, capsys, monkeypatch):
    """The measured part is traced, and a summary goes to stderr."""
    from jaxinfer.engine import profile

    named = []

    @contextmanager
    def trace(directory):
        named.append(directory)
        yield profile.Profile(tmp_path)

    monkeypatch.setattr(profile, "profile", trace)
    monkeypatch.setattr(bench, "prepare_backend", lambda args: named.append(args.profile))
    assert call("throughput", flags, *SIZES, "--profile", "traces") == 0
    assert named == ["traces", "traces"]
    assert "no kernel ran" in capsys.readouterr().err


def test_progress_is_told_on_a_terminal_only(capsys, monkeypatch):
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich asks for more than isatty
        with bench._status() as tell:
            tell("loading")
            report = bench._compile_teller(tell)
            report(2, False)
            time.sleep(0.3)
            report(0, True)
            report(0, True)
        assert ("compiling 2 programs" in capsys.readouterr().err) == is_terminal


def test_an_unknown_device_has_no_floor(flags, capsys, monkeypatch):
    monkeypatch.setattr(measure, "roof_here", lambda num_devices: None)
    assert call("throughput", flags, *SIZES, "--json", "-") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["roof"], report["floor"], report["share_of_floor"]) == (None, None, None)
    assert "no floor" in err


def test_a_named_shape_has_random_weights_and_no_tokenizer(capsys, monkeypatch):
    """A small shape under a borrowed name: the baselines' are too large for a test."""
    from jaxinfer.metrics import shapes

    small = shapes.ModelShape(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, vocab_size=300
    )
    monkeypatch.setitem(shapes.SHAPES, "0.6b", small)
    flags = ["--config", "0.6b", "--num-blocks", "4", "--max-num-seqs", "1", "--max-num-batched-tokens", "16"]
    flags += ["--mesh", "tensor=2"]
    report = report_of("throughput", flags, capsys, *SIZES)
    assert report["model"]["name"] == "0.6b"
    assert report["model"]["architecture"] == "Qwen3ForCausalLM"
    assert report["model"]["num_parameters"] == small.num_parameters
    assert report["engine"]["load_format"] == "dummy"
    assert (report["engine"]["mesh"], report["device"]["count"]) == ("tensor=2", 2)


@pytest.mark.slow
def test_replicas_are_measured_as_one(flags, capsys):
    """A batch may be as large as all replicas run at once; counts are of all, and every token is noted."""
    more = ["--batch-size", "6", "--input-len", "5", "--output-len", "5", "--iterations", "3"]
    report = report_of("latency", [*flags, "--mesh", "data=2,tensor=2"], capsys, *more)
    assert (report["engine"]["mesh"], report["device"]["count"]) == ("data=2,tensor=2", 4)
    assert report["engine"]["max_num_seqs"] == 3
    measured = report["measured"]["throughput"]
    assert (measured["num_failed"], measured["num_output_tokens"]) == (0, 6 * 5 * 3)


def test_failed_requests_are_counted_and_told(flags, capsys, monkeypatch):
    def drive(engine, jobs, params, real=measure.drive):
        records = real(engine, jobs, params)
        records[0].error = "a step failed"
        return records

    monkeypatch.setattr(measure, "drive", drive)
    assert call("throughput", flags, *SIZES) == 1
    assert "note: 1 of 3 requests failed: a step failed" in capsys.readouterr().out


def test_interrupt_is_a_word(flags, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", interrupt)
    assert call("throughput", flags, *SIZES) == arguments.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


ASK = "say what to run"
MISTAKES = {
    "no command": ("", [], "throughput|latency|load"),
    "other command": ("speed", [], "invalid choice: 'speed'"),
    "no workload": ("throughput", [], ASK),
    "two workloads": ("throughput", [*SIZES, "--workload", "nano"], ASK),
    "half a workload": ("throughput", ["--input-len", "5"], "--input-len and --output-len go together"),
    "workload": ("throughput", ["--workload", "femto"], "invalid choice: 'femto'"),
    "count": ("throughput", [*SIZES, "--num-prompts", "0"], "'0' is not a positive integer"),
    "length": ("latency", ["--input-len", "x"], "'x' is not a positive integer"),
    "rate": ("load", [*SIZES, "--request-rate", "-1"], "'-1' is not a positive number or inf"),
    "nan": ("load", [*SIZES, "--request-rate", "nan"], "'nan' is not a positive number or inf"),
    "no arrivals": ("load", SIZES, "when do requests arrive?"),
    "objective": ("load", [*SIZES, "--request-rate", "1", "--slo", "itl:5"], "a name of ttft, tpot, e2e"),
    "trace": ("load", ["--trace", "/nonexistent/t"], "No such file"),
    "json": ("latency", ["--json", "/nonexistent/t"], "--json /nonexistent/t: it cannot be written"),
    "temperature": ("latency", ["--temperature", "-1"], "temperature must be a finite number >= 0"),
    "setting": ("latency", ["--depth", "0"], "depth must be an integer of at least 1"),
    "mesh": ("latency", ["--mesh", "expert=2"], "mesh axis expert=2 is not supported yet"),
    "config and model": ("latency", ["--config", "8b"], "give one of them"),
    "too long": ("latency", ["--input-len", "2000"], "request 0 has 2000 + 128 tokens; max_model_len is 2032"),
    "batch": ("latency", ["--batch-size", "5"], "--batch-size 5 needs --max-num-seqs 5; it is 3"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(flags, name, capsys):
    command, more, message = MISTAKES[name]
    assert call(command, flags, *more) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert message in err


def test_mistakes_of_named_shapes_and_traces(tmp_path, capsys):
    for flags, message in (
        (["--config", "30b-a3b"], "architecture Qwen3MoeForCausalLM is not supported"),
        (["--config", "0.6b", "--load-format", "gguf"], "--config has random weights"),
        (["--config", "70b"], "invalid choice: '70b'"),
    ):
        assert call("latency", flags) == 2
        assert message in capsys.readouterr().err
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_len": 1, "output_len": 1, "arrival": 0}')
    assert call("load", ["--trace", str(trace), "--request-rate", "1"]) == 2
    assert "has arrivals: leave --request-rate out" in capsys.readouterr().err


def test_help_names_what_there_is(capsys):
    assert call("--help", []) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("throughput", "latency", "load", "--request-rate", "--slo"))
    assert call("load", ["--help"]) == 0
    out = capsys.readouterr().out
    for flag in ("--trace", "--config", "--json", "--seed", "--warmup", "--max-num-seqs", "--kernels", "--depth"):
        assert flag in out


# -- driving the engine --------------------------------------------------------------------------

PARAMS = SamplingParams(temperature=0.6, ignore_eos=True)


@pytest.fixture(scope="module")
def subject(folder):
    options = {"model": str(folder), "num_blocks": 128, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    return measure.load_subject(None, options)


def test_a_job_counts_from_when_it_was_due(subject):
    """One row: the second waits for the first, the third comes later, the order of the list does not matter."""
    third, first, second = measure.drive(
        subject.llm.engine, [Job([1, 2], 3, arrival=0.3), Job([3, 4], 3), Job([5, 6], 3)], PARAMS
    )
    for record in (first, second, third):
        assert [count for _, count in record.events] == [1, 2, 3]
        assert record.ttft > 0
        assert record.e2e >= record.ttft
    assert second.events[0][0] > first.events[-1][0]
    assert third.events[0][0] > 0.3 == third.arrival
    assert first.ttft == first.events[0][0]


def test_the_measured_part_is_what_around_surrounds(subject):
    """Entered once, behind the warm-up; prompts of the warm-up are no prefixes of the measured ones'."""
    seen = []

    @contextmanager
    def around():
        seen.append(subject.llm.stats())
        yield
        seen.append(subject.llm.stats())

    jobs = draw_fixed(VOCAB, 2, 15, 3)
    result = measure.measure(subject, [jobs, jobs], PARAMS, around)
    before, after = seen
    assert before["num_steps"] > 0
    assert after["num_steps"] - before["num_steps"] == result.counts["num_steps"] == 12
    assert [record.num_cached_tokens for record in result.records] == [0] * 4
    assert result.counts["num_compiles_while_serving"] == 0


def test_prefix_hits_lower_the_floor(subject):
    """Equal prompts in one round: the floor is that of the work that was left."""
    jobs = [Job([7] * 40, 2)] * 2
    result = measure.measure(subject, [jobs], PARAMS)
    assert [record.num_cached_tokens for record in result.records] == [0, 39]
    roof = Roof(1e12, 1e12, "data sheet")
    with_hits = measure.floor_of(subject, jobs, result.records, roof)
    fresh = measure.floor_of(subject, jobs, [result.records[0]] * 2, roof)
    assert with_hits.cost.operations < fresh.cost.operations


def test_the_roof_of_a_cpu_is_measured():
    roof = MEASURE_ROOF()
    assert roof.source == "measured"
    assert 1e8 < roof.bandwidth < 1e13
    assert 1e8 < roof.peak < 1e15

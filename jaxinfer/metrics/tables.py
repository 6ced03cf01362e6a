"""A benchmark's report as tables. Needs rich, which is imported when a table is drawn."""

from __future__ import annotations

import sys
from typing import Any

from jaxinfer.metrics.report import LATENCIES, RATES
from jaxinfer.metrics.summary import QUANTILES

LABELS = {
    "output_tokens_per_second": "output tokens",
    "total_tokens_per_second": "all tokens",
    "requests_per_second": "requests",
}


def print_tables(report: dict[str, Any], *, to_stderr: bool = False) -> None:
    """Latencies, rates, and lines that say what they are of."""
    from rich.console import Console

    console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
    for line in header(report):
        console.print(line, markup=False)
    console.print(_latency_table(report))
    console.print(_rate_table(report))
    for line in footer(report):
        console.print(line, markup=False)
    (sys.stderr if to_stderr else sys.stdout).flush()


def header(report: dict[str, Any]) -> list[str]:
    """What was measured, on what, with which versions."""
    model, engine, versions, device = (report[name] for name in ("model", "engine", "versions", "device"))
    workload = ", ".join(f"{name} {value}" for name, value in report["workload"].items() if name != "name")
    return [
        f"{report['command']}: {report['workload']['name']} ({workload})",
        f"model {model['name']} ({model['architecture']}, {model['num_parameters'] / 1e9:.3g}B, {model['dtype']}, "
        f"KV cache {engine['kv_cache_dtype']}), "
        f"kernels {engine['kernels']}, depth {engine['depth']}, max_num_seqs {engine['max_num_seqs']}, "
        f"budget {engine['max_num_batched_tokens']}, {engine['num_blocks']} blocks of {engine['block_size']}",
        f"jaxinfer {versions['jaxinfer']}, jax {versions['jax']}, python {versions['python']}, {versions['platform']}, "
        f"{device['platform']} {device['kind']}" + (f" x {device['count']}" if device["count"] > 1 else ""),
    ]


def footer(report: dict[str, Any]) -> list[str]:
    """Start-up, steps, what the floor is made of, and what is suspicious."""
    engine, measured, counts = report["engine"], report["measured"], report["measured"]["counts"]
    lines = [
        f"loaded in {engine['load_seconds']:.1f} s ({engine['num_programs']} programs, compiled in "
        f"{engine['compile_seconds']:.1f} s), {counts.get('num_steps', 0)} steps in {measured['seconds']:.2f} s"
    ]
    lines.append(_floor_line(report))
    failed = measured["throughput"]["num_failed"]
    late = counts.get("num_programs", 0) + counts.get("num_compiles_while_serving", 0)
    doubts = [
        (
            failed,
            f"{failed} of {measured['throughput']['num_requests']} requests failed: {'; '.join(measured['errors'])}",
        ),
        (late, "programs were compiled while it was measured: run it again with a warm compilation cache"),
        (counts.get("num_preemptions", 0), f"{counts.get('num_preemptions')} preemptions: the KV cache is too small"),
    ]
    return lines + [f"note: {text}" for is_so, text in doubts if is_so]


def _floor_line(report: dict[str, Any]) -> str:
    if report["floor"] is None:
        return f"no floor: bandwidth and peak of {report['device']['kind']} are not known"
    roof, cost = report["roof"], report["floor"]["cost"]
    share = cost["memory_bound_seconds"] / cost["seconds"] if cost["seconds"] else 0.0
    return (
        f"floor of one round: {cost['seconds'] * 1e3:.4g} ms in {cost['num_steps']} steps: weights "
        f"{cost['weight_bytes'] / 1e12:.3g} TB, KV {cost['kv_bytes'] / 1e12:.3g} TB, logits "
        f"{cost['logits_bytes'] / 1e12:.3g} TB at {roof['bandwidth'] / 1e9:.4g} GB/s, "
        f"{cost['operations'] / 1e12:.4g} TFLOP at {roof['peak'] / 1e12:.4g} TFLOP/s ({roof['source']}); "
        f"bandwidth binds {share:.0%} of it"
    )


def _latency_table(report: dict[str, Any]):
    from rich.table import Table

    measured, floor, share = report["measured"], report["floor"], report["share_of_floor"]
    table = Table("ms", title="latencies; floor and share: of the medians", title_justify="left")
    for name in ("n", "mean", *QUANTILES, "floor", "share"):
        table.add_column(name, justify="right")
    for name in LATENCIES:
        one = measured[f"{name}_ms"]
        table.add_row(
            name.upper(),
            str(one["count"]),
            *(_number(one[kind]) for kind in ("mean", *QUANTILES)),
            "-" if floor is None else _number(floor[f"{name}_ms"]["p50"]),
            "-" if share is None else _share(share[f"{name}_ms"]["p50"]),
        )
    return table


def _rate_table(report: dict[str, Any]):
    from rich.table import Table

    measured, floor, share = report["measured"], report["floor"], report["share_of_floor"]
    table = Table("a second")
    for name in ("measured", "floor", "share"):
        table.add_column(name, justify="right")
    for name in RATES:
        ideal = "-" if floor is None else _number(floor["throughput"][name])
        table.add_row(
            LABELS[name],
            _number(measured["throughput"][name]),
            ideal,
            "-" if share is None else _share(share[name]),
        )
    if measured["goodput"] is not None:
        said = ", ".join(f"{name} <= {value:g} ms" for name, value in report["objectives_ms"].items())
        ideal = None if floor is None else floor["goodput"]
        for name, label, show in (
            ("requests_per_second", f"good requests ({said})", _number),
            ("attainment", "attainment", _share),
        ):
            table.add_row(label, show(measured["goodput"][name]), "-" if ideal is None else show(ideal[name]), "")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 10 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"

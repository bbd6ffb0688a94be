"""`bertfast info`: what runs here, what does not, and what to do about it."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from bertfast.cli.console import json_option, output, print_json

LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy")
REMEDIES = {
    "cpu": "build the extension (needs a C++ compiler): pip install --no-build-isolation bertfast",
    "cuda": "where torch is built with CUDA and there is nvcc, build the extension with CUDA: "
    "BERTFAST_BUILD=cuda pip install --no-build-isolation bertfast",
    "triton": "on a machine with an NVIDIA GPU, install Triton: pip install 'bertfast[triton]'",
}
# There is nothing to install.
NO_GPU = {"cuda": "built, no GPU here", "triton": "installed, no GPU here"}


@click.command()
@json_option
def info(as_json: bool) -> None:
    """Show versions, extension, GPUs and backends."""
    report = collect()
    if as_json:
        print_json(report)
    else:
        _print(report)


def collect() -> dict:
    """Everything that the command shows, as plain data."""
    import torch

    import bertfast
    from bertfast import backends

    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    candidates = backends.candidates()
    lacking = {candidate.backend for candidate in candidates if candidate.unavailable_reason()}
    return {
        "versions": {
            "bertfast": bertfast.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in LIBRARIES},
        },
        "system": f"{platform.system()} {platform.machine()}",
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "extension": _extension(),
        "backends": [
            {"op": candidate.op, "backend": candidate.backend, "unavailable": _unavailable(candidate, gpus)}
            for candidate in candidates
        ],
        "advice": {name: remedy for name, remedy in REMEDIES.items() if name in lacking},
    }


def _unavailable(candidate, gpus: list[dict]) -> str | None:
    reason = candidate.unavailable_reason()
    if reason is None and candidate.devices == {"cuda"} and not gpus:
        return NO_GPU[candidate.backend]
    return reason


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> dict:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def _extension() -> dict:
    from bertfast import _extension

    status = _extension.STATUS
    state, reason = status.state, status.reason
    if state == "loaded" and not _extension.verify_hash():
        state, reason = "broken", "the file differs from what the build recorded; build it again"
    return {"state": state, "reason": reason, "archs": status.info.get("archs") or [], "build": status.info}


def _print(report: dict) -> None:
    from rich.table import Table

    console = output()

    def grid(rows, *titles: str) -> None:
        table = Table(*titles, box=None, pad_edge=False, show_header=bool(titles))
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()

    extension = report["extension"]
    facts = [(name, version or "not installed") for name, version in report["versions"].items()]
    facts += [("system", f"{report['system']}, {report['torch_threads']} torch threads")]
    facts += [("torch built for", f"CUDA {report['cuda']}" if report["cuda"] else "CPU")]
    gpus = ", ".join(f"{g['name']} (compute {g['capability']}, {g['memory_gib']} GiB)" for g in report["gpus"])
    compiled = ["CPU", *extension["archs"]] if extension["state"] == "loaded" else ["nothing"]
    facts += [("GPUs", gpus or "none")]
    facts += [("extension", extension["state"] + (f": {extension['reason']}" if extension["reason"] else ""))]
    facts += [("compiled for", ", ".join(compiled))]
    grid(facts)
    grid(
        ((row["op"], row["backend"], row["unavailable"] or "available") for row in report["backends"]),
        "op",
        "backend",
        "state",
    )
    for name, remedy in report["advice"].items():
        console.print(f"{name}: {remedy}", markup=False)

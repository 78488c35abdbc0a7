"""What a measurement was taken on and with: without that a figure means nothing."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("motet", "torch", "transformers", "tokenizers", "uvicorn")


def machine() -> dict[str, str]:
    return {
        "cpu": cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        **{package: version(package) for package in PACKAGES},
        "command": " ".join(sys.orig_argv),
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

"""The machine as the operating system tells it: CPU, memory, disk, heat, versions. Reads files of Linux; guesses nothing.

What is not told here (another system, a container without /sys) is None.
"""

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Instructions that llama.cpp's kernels for 4 and 8 bits are made for: as the kernel and as llama.cpp call them.
KERNELS = {
    "avx2": "AVX2", "avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI", "avx_vnni": "AVX_VNNI", "fma": "FMA", "f16c": "F16C",
    "asimd": "NEON", "asimddp": "DOTPROD", "i8mm": "MATMUL_INT8", "sve": "SVE", "fphp": "FP16_VA",
}  # fmt: skip
PACKAGES = ("paceline", "llama_cpp_python", "numpy", "websockets", "tokenizers", "onnxruntime")


@dataclass(frozen=True)
class Machine:
    """Bytes, degrees Celsius, MHz. `features` are names of `KERNELS`; `compiled` those that llama.cpp was built to use."""

    system: str
    cpu: str
    cores: int
    features: tuple[str, ...]
    compiled: tuple[str, ...]
    memory: int | None
    memory_free: int | None
    disk_free: int
    temperature: float | None
    governor: str | None
    clock: float | None
    clock_limit: float | None
    clock_made_for: float | None
    versions: dict[str, str]


def look(cache: Path, root: Path = Path("/")) -> Machine:
    """This machine; `cache` is where models will lie, `root` where /proc and /sys are."""
    cpuinfo, frequency = _text(root / "proc/cpuinfo"), root / "sys/devices/system/cpu/cpu0/cpufreq"
    memory, free = _memory(root)
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_field(cpuinfo, r"model name|Model|Hardware") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        features=_features(cpuinfo),
        compiled=compiled(),
        memory=memory,
        memory_free=free,
        disk_free=shutil.disk_usage(_existing(cache)).free,
        temperature=_hottest(root),
        governor=_text(frequency / "scaling_governor").strip() or None,
        clock=_megahertz(frequency / "scaling_cur_freq"),
        clock_limit=_megahertz(frequency / "scaling_max_freq"),
        clock_made_for=_megahertz(frequency / "cpuinfo_max_freq"),
        versions=_versions(),
    )


def compiled() -> tuple[str, ...]:
    """What the installed llama.cpp uses of `KERNELS`, as it says itself; nothing where it is not installed."""
    try:
        import llama_cpp
        from paceline.kernels.llama import quiet
    except ImportError:
        return ()
    quiet()
    said = llama_cpp.llama_print_system_info().decode()
    names = set(re.findall(r"(\w+) = 1", said))
    return tuple(sorted(name for name in set(KERNELS.values()) if name in names))


def _features(cpuinfo: str) -> tuple[str, ...]:
    flags = set((_field(cpuinfo, "flags|Features") or "").split())
    return tuple(sorted(ours for theirs, ours in KERNELS.items() if theirs in flags))


def _memory(root: Path) -> tuple[int | None, int | None]:
    """All of it and what is free, in bytes: of the machine, or of the control group where that is less."""
    told = _text(root / "proc/meminfo")
    found = [_field(told, name) for name in ("MemTotal", "MemAvailable")]
    total, free = (int(f.split()[0]) * 1024 if f else None for f in found)
    limit, used = (_text(root / f"sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and (total is None or int(limit) < total):
        total = int(limit)
        free = min(free if free is not None else total, total - int(used)) if used.isdigit() else free
    return total, free


def _hottest(root: Path) -> float | None:
    told = [_text(p).strip() for p in (root / "sys/class/thermal").glob("thermal_zone*/temp")]
    return max((int(t) / 1000 for t in told if t.lstrip("-").isdigit()), default=None)


def _megahertz(path: Path) -> float | None:
    told = _text(path).strip()
    return int(told) / 1000 if told.isdigit() else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version() + (" 32 bit" if sys.maxsize < 2**32 else "")}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _field(text: str, name: str) -> str | None:
    found = re.search(rf"^(?:{name})\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

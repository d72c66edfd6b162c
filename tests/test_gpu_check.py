"""The GPU check's dry run, and the Triton kernels through the compiler for the GPUs it is meant for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_dry_run_passes(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = [str(ROOT / "scripts" / "gpu_check"), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "all parts passed" in done.stdout
    assert (tmp_path / "out.json").stat().st_size > 500


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_the_gpus_they_are_meant_for(capability: int) -> None:
    """Triton brings its assembler along, so an A100's and an H100's code can be made without one."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 16

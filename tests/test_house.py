"""The house: which package may import which, what each works without, and the commands people start with."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: What each package may import of Paceline, beside itself. Dependencies point down.
LAYERS: dict[str, set[str]] = {
    "protocol": set(),
    "kernels": {"protocol"},
    "quant": {"protocol", "kernels"},
    "edge": {
        "protocol",
        "kernels.heap",
        "kernels.llama",
        "kernels.onnx_session",
        "kernels.threads",
        "kernels.token_map",
        "kernels.worker",
    },
    "cloud": {"protocol", "kernels", "quant"},
    "scripts": {"protocol", "kernels", "quant", "edge", "cloud"},
}
PACKAGES = list(LAYERS)
#: Never imported by these packages, whatever is installed.
NEVER = {
    "protocol": {"torch", "llama_cpp", "transformers", "websockets", "asyncio", "socket", "time"},
    "edge": {"torch"},
}
#: Heavy or optional: never imported by merely importing a package's modules, except the modules that are made for one.
TORCH = "batch|checkpoint|gguf_checkpoint|graphs|kv|loader|logprobs|model|pages|product|quantised|random_checkpoint"
TORCH += "|torch_target|witness"  # modules of the torch engine in cloud/
OPTIONAL = ["ray", "torch", "triton", "llama_cpp", "bitsandbytes", "transformers", "onnxruntime", "onnx"]


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def parsed(text: str) -> ast.Module:
    """CPython 3.11 may lose count of its recursion while another thread moves the limit, and says so once."""
    try:
        return ast.parse(text)
    except SystemError:
        return ast.parse(text)


def imports(path: Path) -> Iterator[str]:
    """The full name of everything `path` imports, at its top or inside a function."""
    own = ["paceline", *path.relative_to(ROOT).with_suffix("").parts]
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = own[: len(own) - node.level] if node.level else []
            module = ".".join([*above, node.module or ""]).strip(".")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_point_down(package: str) -> None:
    allowed = {f"paceline.{name}" for name in LAYERS[package] | {package}}
    for path in sources(package):
        for name in imports(path):
            if within(name, "paceline"):
                assert any(within(name, below) for below in allowed), f"{path} imports {name}"
            assert name.split(".")[0] not in NEVER.get(package, set()), f"{path} imports {name}"


def test_no_bare_name_of_ours_is_imported() -> None:
    for path in [*(ROOT / "tests").rglob("*.py"), *(file for package in PACKAGES for file in sources(package))]:
        for name in imports(path):
            assert name.split(".")[0] not in PACKAGES, f"{path} imports {name}, which is not paceline.{name}"


def test_the_check_sees_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "edge").mkdir()
    bad = tmp_path / "edge" / "bad.py"
    bad.write_text("from ..cloud import server\nimport kernels\ndef f():\n    import torch\n")
    assert list(imports(bad)) == ["paceline.cloud.server", "kernels", "torch"]
    with pytest.raises(AssertionError, match=r"imports paceline\.cloud\.server"):
        test_dependencies_point_down("edge")


def python(code: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT.parent, check=False)


def module_name(path: Path) -> str:
    parts = ["paceline", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_without(package: str, blocked: list[str]) -> subprocess.CompletedProcess[str]:
    """Import every module of `package`, except those that are bindings to something blocked, in a fresh process."""
    bound = {
        "torch": rf"kernels/|quant/|scripts/gpu_check|cloud/({TORCH})\.py|cloud/engines/torch",
        "llama_cpp": r"llama|cloud/backup_draft|scripts/lab/(?!cli|command_)|scripts/doctor/expected",
        "onnxruntime": r"kernels/onnx_session|edge/drafts/onnx",
    }
    skip = re.compile("|".join(bound[name] for name in blocked if name in bound) or "$^")
    names = [module_name(path) for path in sources(package) if not skip.search(path.relative_to(ROOT).as_posix())]
    return python(
        f"import importlib, sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\nprint(len({names!r}))"
    )


@pytest.mark.parametrize(
    ("package", "blocked"),
    [
        ("protocol", OPTIONAL),
        ("edge", ["torch", "triton", "bitsandbytes", "transformers", "onnx"]),
        ("edge", OPTIONAL),
        ("cloud", OPTIONAL),
        ("scripts", OPTIONAL),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_each_side_imports_without_what_it_does_not_need(package: str, blocked: list[str]) -> None:
    done = import_without(package, blocked)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.parametrize("library", ["bitsandbytes", "transformers"])
def test_paceline_hides_nobodys_kernels(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    ours = "".join(f"import paceline.{package}\n" for package in PACKAGES)
    done = python(f"{ours}import {library}")
    assert done.returncode == 0, done.stderr
    assert (
        str(ROOT / "kernels") not in done.stderr
    )  # where both would complain of a package that is not the one they want


def test_the_installed_names_are_paceline_alone() -> None:
    done = python(
        "import importlib.util, paceline.protocol\n"
        f"for name in {PACKAGES!r}:\n"
        "    spec = importlib.util.find_spec(name)\n"
        f"    assert spec is None or not str(spec.origin).startswith({str(ROOT)!r}), (name, spec)\n"
    )
    assert done.returncode == 0, done.stderr


def test_every_package_is_declared() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    there = {module_name(path) for package in PACKAGES for path in sources(package) if path.name == "__init__.py"}
    assert there == set(settings["packages"])


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from paceline.scripts.cli import main; main()"
    env = os.environ | {"COLUMNS": "120"} | environment
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, check=False
    )


def test_help_and_version() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert "models" in done.stdout
    try:
        assert command("--version").stdout == command("version").stdout == f"paceline {version('paceline')}\n"
    except PackageNotFoundError:
        assert "not installed" in command("--version").stdout


def test_models_are_listed(tmp_path: Path) -> None:
    done = command("models", "list", PACELINE_CACHE=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"smollm2 .*Apache-2\.0 .*98\.4 MB .*no", done.stdout)
    assert not (tmp_path / "none").exists()


def test_an_error_is_one_line_and_a_traceback_is_there_when_asked_for() -> None:
    done = command("models", "fetch", "smolm2")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("paceline: There is no model 'smolm2'. Did you mean smollm2?")
    assert done.stderr.count("\n") == 1
    debug = command("--debug", "models", "fetch", "smolm2")
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr


def test_the_commands_of_the_readme_are_there_and_sound() -> None:
    for name in ("scripts/demo", "scripts/test", ".ci/run", "scripts/link_types"):
        assert os.access(ROOT / name, os.X_OK), name
        assert subprocess.run(["sh", "-n", str(ROOT / name)], check=False).returncode == 0, name


@pytest.mark.parametrize(
    ("missing", "said"),
    [("python3", "Python 3.11 or newer is needed"), ("cc", "A C compiler is needed"),
     ("c++", r"A C\+\+ compiler is needed"), ("cmake", "cmake is needed")],
)  # fmt: skip
def test_what_a_machine_lacks_is_said_in_one_sentence(tmp_path: Path, missing: str, said: str) -> None:
    tools = {"python3": sys.executable, "cc": "/bin/sh", "c++": "/bin/sh", "cmake": "/bin/sh"}
    for tool in ("sh", "dirname", "cat", "cksum", "tr"):
        tools[tool] = next(f"{folder}/{tool}" for folder in ("/bin", "/usr/bin") if Path(folder, tool).exists())
    for tool, target in tools.items():
        if tool != missing:
            (tmp_path / tool).symlink_to(target)
    env = {"PATH": str(tmp_path), "PACELINE_VENV": str(tmp_path / "venv")}
    done = subprocess.run([ROOT / "scripts/demo"], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    assert re.fullmatch(rf"paceline: {said}.*\n", done.stderr), done.stderr
    assert not (tmp_path / "venv").exists()

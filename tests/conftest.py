"""What several test modules share: the real models, and the switch for tests that take minutes."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.scripts.models import cache_folder, fetch, resolve_pair


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --slow"))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command that a test runs in this process may set logging up, on a stream that ends with the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF of SmolLM2-135M-Instruct in this user's cache; really fetched when it is not there."""
    return fetch("smollm2", cache_folder(), verify=True)


@pytest.fixture(scope="session")
def smollm2_draft_path(smollm2_path: Path) -> Path:
    """The default draft of SmolLM2, requantised from it into this user's cache."""
    return resolve_pair("smollm2", cache_folder()).draft


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The GGUF of Gemma 3 270M in this user's cache; really fetched when it is not there."""
    return fetch("gemma3-270m", cache_folder(), verify=True)


@pytest.fixture(scope="session")
def smollm2_rounded_path(smollm2_path: Path) -> Path:
    """SmolLM2 requantised by llama.cpp's own quantiser, made once into this user's cache."""
    return resolve_pair("smollm2-rounded", cache_folder()).draft


@pytest.fixture(scope="session")
def smollm2_onnx_path(smollm2_path: Path, smollm2_draft_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default draft of SmolLM2 for ONNX Runtime, exported from its GGUF."""
    pytest.importorskip("onnx")
    from paceline.quant.onnx_export import export

    out = tmp_path_factory.mktemp("onnx") / "draft"
    export(smollm2_draft_path, out, target=smollm2_path)
    return out / "draft.onnx"

"""What is shipped to run it with: containers, manifests, units, dashboard, locks. Checked against the code, without an engine."""

import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from paceline.cloud.connection import House
from paceline.cloud.engine import Blocks
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.metrics import exposition, registry
from paceline.cloud.scheduler import Scheduler
from paceline.cloud.settings import PREFIX, Settings
from paceline.protocol.errors import PacelineError
from paceline.scripts.images import Build, Stage, instructions
from paceline.scripts.lab.virtual import run_engine
from paceline.scripts.ray_app import arguments

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "cloud" / "deploy"
SHIPPED = [
    *DEPLOY.iterdir(),
    *(ROOT / "edge" / "deploy").iterdir(),
    ROOT / "cloud/Dockerfile",
    ROOT / "edge/Dockerfile",
]
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def documents(name: str = "kubernetes.yaml") -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_every_variable_is_a_setting(path: Path) -> None:
    for name in re.findall(rf"{PREFIX}(\w+)", path.read_text()):
        assert name == "CONFIG" or name.lower() in Settings.model_fields, name


# ---- containers


@pytest.mark.parametrize("side", ["cloud", "edge"])
def test_a_dockerfile_is_built_in_stages_and_runs_as_nobody_special(side: str) -> None:
    lines = (ROOT / side / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
    words = [step[0] for step in steps]
    assert set(words) <= {
        *("FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE"),
        *("STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
    }
    assert words.count("FROM") == 2
    last = dict(steps[len(words) - 1 - words[::-1].index("FROM") :])  # type: ignore[arg-type]
    assert last["USER"] == "10001"
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert last["VOLUME"] == "/models"
    assert side == "edge" or "healthz" in last["HEALTHCHECK"]
    for step in steps:
        if step[0] == "COPY" and "--from" not in step[1]:
            for source in step[1].split()[:-1]:
                assert list(ROOT.glob(source.replace("${ENGINE}", "*"))), source


STEPS = [
    "ARG ENGINE=none",
    "ARG OTHER=1",
    "ENV A=/opt/x PATH=/opt/x/bin:$PATH",
    "WORKDIR /src",
    "COPY scripts/locks/${ENGINE}.txt scripts/locks/",
    "COPY pyproject.toml LICENSE ./",
    "COPY protocol protocol",
    'HEALTHCHECK --interval=1s \\\n    CMD ["python", "-c", "1"]',
    "USER 10001",
    'ENTRYPOINT ["paceline"]',
]


def test_steps_are_carried_out_as_an_engine_would(tmp_path: Path) -> None:
    """All but RUN, which needs root: variables, folders, and files as a clean checkout has them."""
    build, stage = Build(tmp_path / "work", {"ENGINE": "cloud"}), Stage(tmp_path / "root")
    build._stages = [("build", stage)]
    stage.root.mkdir()
    for line in STEPS:
        for name, rest in instructions(f"# a comment\n\n{line}\n"):
            build._do(stage, name, rest)
    assert stage.arguments == {"ENGINE": "cloud", "OTHER": "1"}
    assert stage.environment["PATH"].startswith("/opt/x/bin:/usr")
    assert (stage.health, stage.user, stage.entry) == (["python", "-c", "1"], "10001", ["paceline"])
    src = stage.root / "src"
    assert (src / "scripts/locks/cloud.txt").read_bytes() == (ROOT / "scripts/locks/cloud.txt").read_bytes()
    assert {p.name for p in src.iterdir()} == {"scripts", "pyproject.toml", "LICENSE", "protocol"}
    assert (src / "protocol/codec.py").is_file()
    assert not list(src.rglob("__pycache__"))
    final = Stage(tmp_path / "final")
    build._stages.append(("", final))
    build._do(final, "COPY", "--from=build /src/protocol /opt/protocol")
    assert (final.root / "opt/protocol/codec.py").is_file()
    for wrong in ("COPY nothing here", "ADD a b"):
        with pytest.raises(PacelineError, match=wrong.split()[0]):
            build._do(final, *wrong.split(maxsplit=1))


def test_all_packages_are_copied_into_the_images() -> None:
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    for side in ("cloud", "edge"):
        text = (ROOT / side / "Dockerfile").read_text()
        for folder in folders:
            assert f"COPY {folder} {folder}\n" in text


def test_compose_leaves_time_to_drain() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("a", "b"):
        service = services[name]
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        grace = int(service["stop_grace_period"].removesuffix("s"))
        assert grace > float(service["environment"]["PACELINE_CLOUD_DRAIN_TIMEOUT"])
        assert service["read_only"]


# ---- kubernetes


def test_the_manifests_are_valid() -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed")
    import kubernetes_validate

    for document in [*documents(), *documents("ingress.yaml")]:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    broken = documents()[2]
    broken["spec"]["replicas"] = "many"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


def test_a_pod_has_time_to_drain_and_is_selected_by_what_it_is_called() -> None:
    by_kind = {d["kind"]: d for d in documents()}
    pod = by_kind["Deployment"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    drain = float(container["args"][container["args"].index("--drain-timeout") + 1])
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > drain + pause
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in ("/healthz", "/readyz")
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert by_kind[kind]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert by_kind["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    [metric] = by_kind["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in metrics()


def test_what_ray_is_given_are_arguments_of_the_application() -> None:
    [application] = yaml.safe_load((DEPLOY / "ray.yaml").read_text())["applications"]
    module, name = application["import_path"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
    settings, scale = arguments(application["args"])
    assert (settings.slots, scale.min_replicas) == (32, 2)


# ---- metrics, units, locks


class Paged(ToyEngine):
    blocks = Blocks(1, 4, 16)


def metrics() -> set[str]:
    engine = Paged()
    house = House(Scheduler(engine, run_engine, float), "toy", engine.vocabulary, 100)
    return {
        line.split("{")[0].split(" ")[0] for line in exposition(registry(house)).decode().splitlines() if line[0] != "#"
    }


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    shown = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            shown |= set(re.findall(r"paceline_\w+", target["expr"]))
    assert len(shown) > 15
    assert shown <= metrics()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.parametrize("path", [p for p in SHIPPED if p.suffix == ".service"], ids=lambda p: p.name)
def test_a_unit_is_understood_and_hardened(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace("/opt/paceline/bin/paceline", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert path.name not in done.stderr
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:]


@pytest.mark.parametrize("extra", ["edge", "cloud", "cloud-llamacpp"])
def test_everything_is_pinned_by_hash_and_names_no_registry(extra: str) -> None:
    text = (ROOT / "scripts" / "locks" / f"{extra}.txt").read_text()
    assert "://" not in text
    entries = re.split(r"\n(?=\S)", text.strip())
    for entry in entries:
        assert re.match(r"[a-z0-9.-]+==\S+", entry), entry[:80]
        assert "--hash=sha256:" in entry
    pinned = {entry.split("==")[0] for entry in entries}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + project["optional-dependencies"][extra]
    names = {re.split(r"[<>=;\[ ]", a)[0].lower().replace("_", "-") for a in asked}
    assert names <= pinned, f"scripts/lock: {names - pinned}"


def test_what_is_installed_can_be_listed() -> None:
    if shutil.which("cyclonedx-py") is None:
        pytest.skip("cyclonedx-bom is not installed")
    done = subprocess.run([ROOT / "scripts" / "sbom", "edge"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    bom = json.loads(done.stdout)
    assert bom["bomFormat"] == "CycloneDX"
    assert {"numpy", "websockets"} <= {c["name"] for c in bom["components"]}

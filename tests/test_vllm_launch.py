"""What vLLM is asked for, and what is refused by name because it would not be honoured to the letter."""

import itertools
import json
from pathlib import Path

import pytest
from paceline.cloud.settings import Settings, effective
from paceline.cloud.vllm import launch, params
from paceline.protocol.cloud_session import CloudSession, Limits
from paceline.protocol.errors import Code, PacelineError, ProtocolError
from paceline.protocol.messages import Open
from paceline.protocol.sampling import Sampling


def opened(sampling: Sampling, held: tuple[int, ...] = ()) -> Open:
    return Open(sid=3, prompt=(1, 2), sampling=sampling, max_tokens=10, stop_ids=(9, 4), held=held, logprobs=2)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(logit_bias=((1, 2.0),)), "logit_bias"),
        (Sampling(presence_penalty=0.5), "presence_penalty"),
        (Sampling(frequency_penalty=-0.5), "frequency_penalty"),
        (Sampling(temperature=0.7, min_p=0.1), "min_p"),
        (Sampling(temperature=0.7, top_p=0.9, temperature_last=True), "filters after the temperature"),
        (Sampling(temperature=2.5), "temperatures"),
        (Sampling(temperature=0.001), "temperatures"),
    ],
)
def test_what_vllm_would_leave_out_is_refused(sampling: Sampling, named: str) -> None:
    with pytest.raises(ProtocolError, match=named) as e:
        params.demand(opened(sampling))
    assert (e.value.code, e.value.sid) == (Code.UNSUPPORTED, 3)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=7),
        Sampling(min_p=0.1, temperature_last=True, top_p=0.5),  # of no effect without a temperature
        Sampling(temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.1),
        Sampling(temperature=0.7, top_k=40, temperature_last=True),
    ],
)
def test_the_rest_is_taken(sampling: Sampling) -> None:
    params.demand(opened(sampling))


def test_vllm_is_asked_for_what_is_left_of_the_text() -> None:
    session = CloudSession(opened(Sampling(temperature=0.7, top_k=40, seed=5), (5, 6, 7)), Limits(12, 100), "")
    asked = params.arguments(session)
    assert asked["max_tokens"] == 7
    assert asked["stop_token_ids"] == [4, 9]
    assert (asked["temperature"], asked["top_k"], asked["top_p"], asked["logprobs"]) == (0.7, 40, 1.0, 2)
    assert asked["ignore_eos"]
    assert "seed" not in asked


def test_greedy_is_greedy_for_vllm_too() -> None:
    session = CloudSession(opened(Sampling(temperature=1e-6, top_k=3)), Limits(12, 100), "")
    assert params.arguments(session)["temperature"] == 0.0
    assert "top_k" not in params.arguments(session)


def test_on_a_cpu_only_greedy_text_is_taken() -> None:
    params.demand(opened(Sampling(top_k=40)), on_cpu=True)  # of no effect without a temperature
    with pytest.raises(ProtocolError, match="temperature"):
        params.demand(opened(Sampling(temperature=0.7)), on_cpu=True)


def test_the_command_carries_the_settings(tmp_path: Path) -> None:
    settings = Settings(
        engine="vllm",
        host="0.0.0.0",
        port=99,
        context=512,
        slots=5,
        width=3,
        tls_certificate=Path("c.pem"),
        tls_clients=Path("ca.pem"),
        vllm_args="--dtype float32 --tensor-parallel-size=2",
    )
    command = launch.arguments(settings, tmp_path)
    values = dict(itertools.pairwise(command))
    assert values["--model"] == str(tmp_path)
    assert (values["--host"], values["--port"]) == ("0.0.0.0", "99")
    assert (values["--max-model-len"], values["--max-num-seqs"]) == ("512", "5")
    assert (values["--ssl-certfile"], values["--ssl-keyfile"]) == ("c.pem", "c.pem")
    assert (values["--ssl-ca-certs"], values["--ssl-cert-reqs"]) == ("ca.pem", "2")
    assert command[-3:] == ["--dtype", "float32", "--tensor-parallel-size=2"]
    speculative = json.loads(values["--speculative-config"])
    assert speculative == {"method": "custom_class", "model": launch.DRAFTER, "num_speculative_tokens": 3}
    module, _, name = launch.DRAFTER.rpartition(".")
    assert hasattr(__import__(module, fromlist=[name]), name)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"verify_floor": 0.03}, "--verify-floor"),
        ({"exact": True}, "--exact"),
        ({"quant": "nf4"}, "--quant"),
        ({"gpu_layers": 3}, "--gpu-layers"),
        ({"threads": 2}, "--threads"),
        ({"device": "cuda:1"}, "--device"),
        ({"keep_order": False}, "--keep-order"),
        ({"backup": "ngram"}, "--backup is"),
        ({"backup_draft": "small.gguf"}, "--backup-draft"),
        ({"ngrams": "ngrams.npz"}, "--ngrams"),
        ({"otel": True}, "--otel"),
        ({"width": 0}, "--width"),
        ({"vllm_args": "--speculative-config={}"}, "--speculative-config"),
        ({"vllm_args": "--api-server-count 2"}, "--api-server-count"),
        ({"vllm_args": "--dtype 'float32"}, "--vllm-args"),
    ],
)
def test_settings_that_vllm_cannot_honour_are_refused(changed: dict[str, object], named: str, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=named):
        launch.arguments(Settings(**changed), tmp_path)  # type: ignore[arg-type]


def test_a_file_is_no_model_for_vllm(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(PacelineError, match="Hugging Face"):
        launch.arguments(Settings(), tmp_path / "model.gguf")


def test_the_door_reads_the_settings_that_the_command_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CLOUD_QUEUE", "7")  # what a flag said wins over it
    settings, _ = effective({"slots": 3, "queue": 5, "keys": tmp_path / "keys", "drain_timeout": 2.5})
    made = launch.environment(
        settings, tmp_path / "box", {"VLLM_PLUGINS": "mine", "PATH": "/bin", "paceline_cloud_queue": "9"}
    )
    assert made["VLLM_PLUGINS"] == "mine,paceline"
    assert made["PACELINE_MAILBOX"] == str(tmp_path / "box")
    assert made["PATH"] == "/bin"
    monkeypatch.delenv("PACELINE_CLOUD_QUEUE")
    for name, value in made.items():
        if name.startswith("PACELINE_CLOUD_"):
            monkeypatch.setenv(name, value)
    assert effective({})[0] == settings


def test_a_bad_key_file_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("laptop short\n")
    with pytest.raises(PacelineError, match="shorter than"):
        launch.launch(Settings(keys=tmp_path / "keys"), tmp_path)

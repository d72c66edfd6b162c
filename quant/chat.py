"""The token sequences around a chat's turns, found by rendering the target's own template around a mark.

Tokenises through llama.cpp (GGUF) or tokenizers (Hugging Face folders), whichever the target came with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from paceline.kernels.gguf_file import GgufFile

from .errors import RecipeError
from .hf_folder import read_json
from .llama import library
from .traces import chat as rendered
from .writer import Chat

MARK = "\u2063mark\u2063"
Tokenize = Callable[[str], list[int]]


def gguf_tokenizer(path: Path) -> tuple[Tokenize, frozenset[int]]:
    """A GGUF file's tokenizer in llama.cpp, and the ids that end a turn. Loads no weights."""
    ll = library()
    params = ll.llama_model_default_params()
    params.vocab_only = True
    model = ll.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise RecipeError(f"llama.cpp cannot load the vocabulary of {path}.")
    vocab = ll.llama_model_get_vocab(model)

    def tokenize(text: str, keep: object = model) -> list[int]:
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 8))()
        return list(out[: ll.llama_tokenize(vocab, data, len(data), out, len(out), False, True)])

    ends = frozenset(t for t in range(ll.llama_vocab_n_tokens(vocab)) if ll.llama_vocab_is_eog(vocab, t))
    return tokenize, ends


def folder_tokenizer(path: Path) -> tuple[Tokenize, frozenset[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ends = read_json(path / "config.json").get("eos_token_id")
    ids = ends if isinstance(ends, list) else [ends]
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), frozenset(
        i for i in ids if i is not None
    )


def template_of(path: Path) -> tuple[str | None, str]:
    """The chat template and the text of the token that begins a sequence."""
    if path.is_dir():
        config = read_json(path / "tokenizer_config.json")
        template, bos = config.get("chat_template"), config.get("bos_token") or ""
        return template if isinstance(template, str) else None, bos["content"] if isinstance(bos, dict) else str(bos)
    metadata = GgufFile(path).metadata
    bos_id, tokens = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.tokens", [])
    wanted = metadata.get("tokenizer.ggml.add_bos_token", True)
    bos = tokens[bos_id] if wanted and isinstance(bos_id, int) and bos_id < len(tokens) else ""
    template = metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None, bos


def chat_of(path: Path) -> tuple[Chat, Tokenize]:
    """How a chat with the target at `path` is spelled, and its tokenizer. Without a template it just writes on from a start."""
    tokenize, ends = folder_tokenizer(path) if path.is_dir() else gguf_tokenizer(path)
    template, bos = template_of(path)
    if template is None:
        start = tokenize(bos) or sorted(ends)[:1]
        if not start:
            raise RecipeError(f"{path.name} has neither a chat template nor a token to begin with; give it --prompts.")
        return Chat(start, [], ends), tokenize
    before, found, behind = rendered(template, MARK, bos).partition(MARK)
    if not found:
        raise RecipeError(f"The chat template of {path.name} does not show the user's words.")
    reply = tokenize(behind)
    return Chat(tokenize(before), reply, ends | frozenset(reply[:1])), tokenize

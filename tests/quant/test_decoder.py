"""The torch decoder against llama.cpp on the same file, and the batched writer's cache against whole sequences."""

from pathlib import Path

import numpy as np
import torch
from paceline.quant import decoder
from paceline.quant.build import halves
from paceline.quant.decoder import Shape
from paceline.quant.llama import LlamaModel, log_softmax
from paceline.quant.target import neighbours, open_target
from paceline.quant.writer import Cache, step


def logits(path: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    target = open_target(path)
    w = {n: target.tensor(n).to(dtype) for n in target.names()}
    x = decoder.embed(target.shape, w[decoder.EMBEDDING], torch.tensor([tokens]))
    return (decoder.hidden(target.shape, w, x)[0] @ decoder.head(w).T).float()


def test_agrees_with_llama_cpp_on_float_weights(tiny: Path) -> None:
    tokens = [1, *range(40, 70), 2, 5]
    ours = torch.log_softmax(logits(tiny, tokens), -1).numpy()
    model = LlamaModel(tiny)
    model.decode(tokens, 0, [True] * len(tokens))
    theirs = np.stack([log_softmax(model.last(i)) for i in range(len(tokens))])
    model.close()
    assert (ours.argmax(1) == theirs.argmax(1)).all()
    assert np.abs(np.exp(ours) - np.exp(theirs)).mean() < 1e-4  # its cache is float16


def test_agrees_with_llama_cpp_on_a_real_model(smollm2_path: Path) -> None:
    model = LlamaModel(smollm2_path)
    tokens = model.tokenize(
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\nThe sky appears blue because"
    )
    model.decode(tokens, 0, [True] * len(tokens))
    theirs = np.stack([model.last(i).argmax() for i in range(len(tokens))])
    model.close()
    ours = logits(smollm2_path, tokens).argmax(-1).numpy()
    assert (ours == theirs).mean() > 0.9  # llama.cpp rounds activations to 8 bits


def test_one_position_at_a_time_equals_the_whole(tiny: Path) -> None:
    target = open_target(tiny)
    w = {n: target.tensor(n).bfloat16() if target.tensor(n).dim() > 1 else target.tensor(n) for n in target.names()}
    tokens = torch.randint(0, 200, (3, 20))
    whole = decoder.hidden(target.shape, w, decoder.embed(target.shape, w[decoder.EMBEDDING], tokens))
    expected = (whole @ decoder.head(w).T).float()
    cache = Cache(target.shape, w, 3, 20)
    for at in range(20):
        got = step(target.shape, w, cache, tokens[:, at], at)
        assert (got - expected[:, at]).abs().max() < 0.05 * expected.abs().max()


def test_rotation_orders_are_inverse_and_equivalent() -> None:
    torch.manual_seed(0)
    w = torch.randn(4 * 16, 32)
    assert torch.equal(neighbours(halves(w, 16), 16), w)
    x = torch.randn(2, 9, 32)
    shape = Shape(1, 32, 4, 4, 16, 10_000.0, 1e-5)
    scores = []
    for weight, interleaved in ((w, True), (halves(w, 16), False)):
        q = (x @ weight.T).view(2, 9, 4, 16)
        turned = decoder.rotate(q, *decoder.rotation(shape, 9), interleaved)
        scores.append(torch.einsum("bshd,bthd->bhst", turned, turned))
    assert torch.allclose(scores[0], scores[1], atol=1e-4)


def test_a_window_hides_what_lies_behind_it() -> None:
    shape = Shape(1, 32, 2, 2, 16, 10_000.0, 1e-5, window=4, pattern=6)
    q, k, v = (torch.randn(1, 2, 10, 16) for _ in range(3))
    near = decoder.attend(shape, q, k, v, local=True)
    k[:, :, :6], v[:, :, :6] = 9.0, 9.0
    assert torch.allclose(decoder.attend(shape, q, k, v, local=True)[:, 9], near[:, 9])
    assert not torch.allclose(decoder.attend(shape, q, k, v)[:, 9], near[:, 9])

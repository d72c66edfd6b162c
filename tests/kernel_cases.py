"""Cases that kernels and their references are held to: layouts with every kind of edge, forests with every kind of choice."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from paceline.cloud.batch import Batch, Share, choices, forest, lay_out
from paceline.cloud.engine import Work
from paceline.kernels.choice import Choices, Forest
from paceline.kernels.layout import PAGE, Block, Layout, prefix_slots
from paceline.protocol.cloud_session import Plan
from paceline.protocol.sampling import History, Sampling
from torch import Tensor
from trees import random_plan


@dataclass(frozen=True)
class AttentionCase:
    q: Tensor  # [R, H, D]
    keys: Tensor  # [Hkv, slots, D]
    values: Tensor
    layout: Layout
    group: int
    in_order: bool  # each row's keys come in the order of positions


# (cached length, new tokens, tree nodes) of each sequence; heads, key heads, head size
_SHAPES: list[tuple[list[tuple[int, int, int]], tuple[int, int, int], bool]] = [
    ([(0, 1, 0)], (2, 1, 16), False),  # a first token alone: no prefix, no tree
    ([(64, 1, 1)], (4, 4, 16), False),  # a whole page, one node
    ([(63, 1, 5), (64, 1, 0), (65, 1, 7)], (4, 2, 32), False),  # on, before and after a page's end
    ([(130, 3, 40), (5, 66, 0)], (3, 1, 16), False),  # a wide tree beside a chunk of more than a block
    ([(0, 2, 70)], (3, 1, 24), False),  # more nodes than a block has rows; a head size that is no power of two
    ([(200, 1, 9), (1, 1, 3)], (8, 1, 16), True),  # exact mode: rows alone
    ([(61, 1, 12), (0, 3, 2)], (2, 1, 16), True),  # exact mode with paths that pass a page's end
    ([(700, 1, 6)], (4, 2, 16), False),  # long enough to be split
]


def attention_case(index: int, dtype: torch.dtype, device: str = "cpu") -> AttentionCase:
    sequences, (heads, kv_heads, d), exact = _SHAPES[index]
    rng, generator = random.Random(index), torch.Generator().manual_seed(index)
    free = list(range(1, 40))
    rng.shuffle(free)
    shares = []
    for length, tokens, nodes in sequences:
        plan = random_plan(rng, nodes, 50)
        pages = np.array([free.pop() for _ in range(-(-(length + tokens + nodes) // PAGE))], dtype=np.int64)
        work = Work(len(shares), (0,) * tokens, plan, Sampling())
        share = Share.of(work, _Held(length, pages))  # type: ignore[arg-type]
        shares.append(share)
    layout = lay_out(shares, exact).layout
    q = torch.randn(layout.rows, heads, d, generator=generator).to(dtype)
    keys, values = (torch.randn(kv_heads, 40 * PAGE, d, generator=generator).to(dtype) for _ in range(2))
    return AttentionCase(q.to(device), keys.to(device), values.to(device), layout, heads // kv_heads, exact)


def attention_share(length: int, tokens: int, plan: Plan) -> Share:
    """A share of a step in pages 0, 1, ..."""
    pages = np.arange(-(-(length + tokens + len(plan.tokens)) // PAGE))
    return Share.of(Work(0, (0,) * tokens, plan, Sampling()), _Held(length, pages))  # type: ignore[arg-type]


class _Held:
    def __init__(self, length: int, pages: np.ndarray) -> None:
        self.tokens, self.pages = [0] * length, pages


def naive_attention(case: AttentionCase, window: int, scale: float) -> Tensor:
    """Row by row, head by head, in float64."""
    out = torch.zeros_like(case.q, dtype=torch.float64)
    for block in case.layout.blocks:
        for r in range(block.rows):
            row = block.first + r
            slots, at = _keys_of(block, r)
            if window:
                slots = slots[at > case.layout.positions[row] - window]
            k, v = (x[:, slots].double().cpu() for x in (case.keys, case.values))
            for h in range(case.q.shape[1]):
                weights = (k[h // case.group] @ case.q[row, h].double().cpu() * scale).softmax(0)
                out[row, h] = weights @ v[h // case.group]
    return out.to(case.q.dtype)


def _keys_of(block: Block, row: int) -> tuple[np.ndarray, np.ndarray]:
    slots = np.concatenate((prefix_slots(block.pages, block.prefix), block.extra[block.mask[row]]))
    return slots, np.concatenate((np.arange(block.prefix), block.extra_positions[block.mask[row]]))


_KINDS = [
    Sampling(),
    Sampling(seed=5, temperature=1e-6),
    Sampling(seed=2**62 + 9, temperature=0.8),
    Sampling(seed=7, temperature=1.3, top_k=5),
    Sampling(seed=8, temperature=0.7, top_p=0.7),
    Sampling(seed=9, temperature=1.0, min_p=0.1),
    Sampling(seed=10, temperature=0.9, top_k=40, top_p=0.9, min_p=0.03),
    Sampling(seed=11, temperature=1.5, top_p=0.6, temperature_last=True),
    Sampling(seed=12, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1),
    Sampling(seed=13, temperature=0.0, logit_bias=((3, 5.0), (4, -100.0), (3, 1.0), (2**30, 9.0))),
    Sampling(seed=14, temperature=1.0, top_k=1),
    Sampling(seed=15, temperature=1.0, top_p=1e-9),
]


def choice_case(seed: int, vocabulary: int = 203) -> tuple[Tensor, Forest, Choices, list[History | None]]:
    """Logits [N, V], a forest of four sessions, their choices, and what NumPy's code needs to know of each row's past.

    The trees hold many likely tokens, so that walks go deep; case 0 has equal logits throughout, others masked vocabulary.
    """
    rng, generator = random.Random(seed), np.random.default_rng(seed)
    likely = rng.sample(range(vocabulary), 4)
    shares, histories = [], []
    for i, nodes in enumerate((0, 1, 4, 8)):
        sampling = _KINDS[(seed + 3 * i) % len(_KINDS)]
        text = rng.choices(range(vocabulary), k=6)
        history = History(text[:3], text[3:]) if sampling.penalised else None
        plan = random_plan(rng, nodes, vocabulary)
        plan = Plan(plan.nodes, tuple(rng.choice(likely) for _ in plan.tokens), plan.parents)
        work = Work(i, (0,), plan, sampling, history)
        shares.append(Share.of(work, _Held(rng.randrange(60), np.arange(1, 4))))  # type: ignore[arg-type]
        histories += _histories(work)
    batch: Batch = lay_out(shares, False)
    logits = generator.standard_normal((len(batch.asked), vocabulary)).astype(np.float32)
    logits[:, likely] += 3
    if seed == 0:
        logits[:] = 1.5
    elif seed % 3 == 0:
        logits[:, 100:] = -np.inf
    cpu = torch.device("cpu")
    return torch.from_numpy(logits), forest(batch, cpu), choices(batch, vocabulary, cpu), histories


def _histories(work: Work) -> list[History | None]:
    if work.history is None:
        return [None] * (1 + len(work.plan.tokens))
    paths: list[list[int]] = [[]]
    for parent, token in zip(work.plan.parents, work.plan.tokens, strict=True):
        paths.append([*paths[parent + 1], token])
    return [work.history.after(path) for path in paths]

"""Does a drafted chain change what is drawn? Two samples of the same three tokens, with and without it, by a chi-square test."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from math import erfc, sqrt
from typing import Any

from paceline.edge.websocket import Address, SocketChannel
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import Commit, Draft, Error, Hello, Open, Opened
from paceline.protocol.sampling import Sampling
from paceline.protocol.vocabulary import Vocabulary

DRAWN = Sampling(temperature=0.4)  # cold enough for few texts; no filter, as vLLM is quicker without
TOKENS, AT_ONCE, LEAST = 3, 8, 10  # of a text; texts at a time; of both samples in a cell of the table


async def p_value(url: str, vocabulary: Vocabulary, prompt: Sequence[int], draws: int) -> dict[str, Any]:
    """Of the hypothesis that both samples have one distribution. The chain is the likeliest text among the plain ones."""
    plain, _ = await _sample(url, vocabulary, prompt, draws, ())
    chain = plain.most_common(1)[0][0]
    ours, accepted = await _sample(url, vocabulary, prompt, draws, chain)
    statistic, degrees = chi_square(plain, ours)
    chance = upper_tail(statistic, degrees)
    return {"p_value": round(chance, 5), "chi_square": round(statistic, 2), "degrees": degrees} | {
        "draws": draws,
        "accepted": accepted,
    }


async def _sample(
    url: str, vocabulary: Vocabulary, prompt: Sequence[int], draws: int, chain: Sequence[int]
) -> tuple[Counter[tuple[int, ...]], int]:
    """Texts and how many drafted tokens were taken; the sessions of one connection run side by side."""
    channel = await SocketChannel.connect(Address(url))
    hello = Hello(
        versions=(1,),
        vocabulary=vocabulary.name[:256],
        vocabulary_size=vocabulary.size,
        fingerprint=vocabulary.fingerprint,
    )
    await channel.send(encode(hello))
    texts: dict[int, list[int]] = {}
    done, accepted, opened = Counter[tuple[int, ...]](), 0, 0
    while done.total() < draws:
        while opened < draws and opened - done.total() < AT_ONCE:
            opened += 1
            await _open(channel, opened, prompt, chain)
        message = decode_from_cloud(await channel.receive())
        if isinstance(message, Error):
            raise PacelineError(message.message)
        if isinstance(message, Opened):
            texts[message.sid] = []
        if isinstance(message, Commit):
            texts[message.sid] += message.tokens
            accepted += message.accepted
            if message.finish:
                done[tuple(texts.pop(message.sid))] += 1
    await channel.close()
    return done, accepted


async def _open(channel: SocketChannel, sid: int, prompt: Sequence[int], chain: Sequence[int]) -> None:
    await channel.send(encode(Open(sid=sid, prompt=tuple(prompt), sampling=DRAWN, max_tokens=TOKENS)))
    if chain:
        parents = (0, *[1] * (len(chain) - 1))
        await channel.send(encode(Draft(sid=sid, base_committed_len=0, first=0, parents=parents, tokens=tuple(chain))))
    await asyncio.sleep(0)


def chi_square(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> tuple[float, int]:
    """Statistic and degrees of freedom of the table of two samples; rare texts share a cell."""
    rare = {text for text in one | other if one[text] + other[text] < LEAST}
    rows = []
    for sample in (one, other):
        cells = Counter[tuple[int, ...]]()
        for text, count in sample.items():
            cells[() if text in rare else text] += count
        rows.append(cells)
    total = sum(row.total() for row in rows)
    statistic = 0.0
    columns = rows[0].keys() | rows[1].keys()
    for column in columns:
        for row in rows:
            expected = (rows[0][column] + rows[1][column]) * row.total() / total
            statistic += (row[column] - expected) ** 2 / expected
    return statistic, max(len(columns) - 1, 1)


def upper_tail(statistic: float, degrees: int) -> float:
    """P(chi-square >= statistic), by the Wilson-Hilferty approximation."""
    spread = 2 / (9 * degrees)
    return erfc(((statistic / degrees) ** (1 / 3) - 1 + spread) / sqrt(spread) / sqrt(2)) / 2

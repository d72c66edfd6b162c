"""The real clock: the link between two processes, and the two clocks against each other."""

import json
from pathlib import Path

import pytest
from paceline.scripts.lab.command_rtt import Question, measure
from paceline.scripts.lab.edges import fitted
from paceline.scripts.lab.network import LinkSpec
from paceline.scripts.lab.real import measure_real
from paceline.scripts.lab.real_link import link_between
from paceline.scripts.lab.real_link import measure as measure_link
from paceline.scripts.lab.report import lines
from paceline.scripts.lab.tunnel import possible


@pytest.mark.parametrize(
    "kind", ["proxy", pytest.param("tun", marks=pytest.mark.skipif(not possible(), reason="root"))]
)
def test_a_link_carries_no_faster_than_it_was_set(kind: str) -> None:
    """A busy machine can make it slower; `paceline bench link` measures by how much."""
    assert measure_link(LinkSpec(0.02), kind).round_trip >= 0.02


@pytest.mark.skipif(not possible(), reason="root")
def test_the_namespaces_go_with_the_link() -> None:
    with link_between(LinkSpec(0.0), "tun") as ends:
        names = [ends.edge[-1], ends.cloud[-1]]
        assert all((Path("/run/netns") / name).exists() for name in names)
    assert not any((Path("/run/netns") / name).exists() for name in names)


@pytest.mark.slow
def test_the_two_clocks_agree(tmp_path: Path, smollm2_draft_path: Path) -> None:
    """At this machine's own speed, within 10 %; needs two cores that nothing else uses."""
    prompts = tmp_path / "p.jsonl"
    texts = ["What is the capital of France?", "Count from one to ten.", "Why is the sky blue?", "Name three rivers."]
    prompts.write_text("\n".join(json.dumps({"id": i, "turns": [t]}) for i, t in enumerate(texts)))

    def question(edge: str) -> Question:
        return Question(
            "smollm2", edge, 0.06, (0.025,), ("ar", "stream"), prompts, 3, 0, 64, 0.0, 0, 1, 0,
        )  # fmt: skip

    real = measure_real(question("native"), 1, None)
    cost = fitted(real.about["step_cost"])
    virtual = measure(question(f"{1e3 * cost.first},{1e3 * cost.more}"), 1, None)
    for a, b in zip(lines(real.entries), lines(virtual.entries), strict=True):
        assert a.policy == b.policy
        assert a.same
        assert b.same
        assert a.speed == pytest.approx(b.speed, rel=0.1)

"""Which nodes go into a step: the likeliest of all sessions while they pay, and nothing that hangs on a worse one."""

import math
from random import Random

import pytest
from paceline.cloud.recycling import Recycling
from paceline.cloud.selection import Part, choose
from paceline.protocol.cloud_session import CloudSession, Limits
from paceline.protocol.cost import StepCost, best_count, step_seconds
from paceline.protocol.messages import Draft, Open
from paceline.protocol.sampling import Sampling

COST = StepCost([(1, 0.01), (16, 0.011), (32, 0.014), (64, 0.03)])


def session(random: Random, nodes: int, max_tokens: int = 60, words: int = 50) -> CloudSession:
    """A session with a random tree."""
    one = CloudSession(Open(sid=1, prompt=(1, 2), sampling=Sampling(), max_tokens=max_tokens), Limits(50, 4096), "t")
    for number in range(nodes):
        back, weight = random.randrange(min(number, 6) + 1), random.choice((0, 1, 4, 9, 30))
        one.receive(Draft(1, 0, number, (back,), (random.randrange(words),), bytes([weight])))
    return one


def free(most: int) -> list[float]:
    return [1.0] * (most + 1)


@pytest.mark.parametrize("most", [0, 1, 3, 8, 1000])
def test_for_one_session_alone_it_is_the_plan_of_the_session(most: int) -> None:
    random = Random(most)
    for nodes in range(0, 60, 3):
        one = session(random, nodes, max_tokens=random.choice((4, 60)))
        part, plan = Part(one), one.plan(most)
        least = choose([part], free(most), 1.0)
        assert part.plan() == plan
        assert (least > -math.inf) == (len(one.plan(1000).nodes) > most)
        assert part.promised == pytest.approx(sum(map(math.exp, one.tree.reaches(plan.nodes))))


@pytest.mark.parametrize("floor", [0.0, 0.012, 0.1])
def test_of_many_it_is_the_best_prefix_of_all_nodes_by_what_they_count(floor: int) -> None:
    random = Random(7)
    for _ in range(40):
        counted = [(session(random, random.randrange(20)), -random.random()) for _ in range(random.randrange(1, 9))]
        rows, base = len(counted), random.uniform(0.5, 1.0) * len(counted)
        everything = sorted(
            (
                (one.tree.reach(node) + counts, -i, -node)
                for i, (one, counts) in enumerate(counted)
                for node in one.plan(1000).nodes
            ),
            reverse=True,
        )
        count = best_count([g for g, _, _ in everything], COST, base_gain=base, base_rows=rows, floor=floor)
        parts = [Part(*one) for one in counted]
        least = choose(parts, step_seconds(200, COST, base_rows=rows, floor=floor).tolist(), base)
        for i, part in enumerate(parts):
            assert sorted(part.nodes) == sorted(-node for _, j, node in everything[:count] if -j == i)
        if count < len(everything):
            assert least == pytest.approx(everything[max(count - 1, 0)][0])
        else:
            assert least == -math.inf


def test_whether_a_node_goes_along_depends_on_better_ones_alone() -> None:
    random = Random(3)
    seconds = step_seconds(200, COST, base_rows=3).tolist()
    for _ in range(60):
        seed = random.random()
        before, after = ([session(Random(f"{seed} {i}"), 12) for i in range(3)] for _ in range(2))
        parts = [Part(one) for one in before]
        least = choose(parts, seconds, 3.0)
        one = after[random.randrange(3)]
        worse = min(least if least > -math.inf else 0.0, 0.0) - 1.0
        if worse < -15:
            continue
        one.receive(Draft(1, 0, 12, (0,), (49,), bytes([math.ceil(-16 * worse)])))
        again = [Part(one) for one in after]
        choose(again, seconds, 3.0)
        for part, other in zip(parts, again, strict=True):
            assert other.nodes[: len(part.nodes)] == part.nodes


def test_what_is_taken_of_others_ideas_is_ranked_with_the_rest_and_parents_come_first() -> None:
    random = Random(11)
    for _ in range(60):
        ones = [session(random, random.randrange(40)) for _ in range(4)]
        for one in ones:
            if random.random() < 0.5:
                one.committed += [7, one.tree.token(one.tree.children(one.tree.root)[0]) if len(one.tree) else 3]
                one.tree.advance(one.committed[-2:])
        recycling = Recycling()
        parts = [Part(one, -random.random(), math.log(0.02)) for one in ones]
        choose(parts, free(random.choice((5, 20, 200))), 4.0, recycling)
        for part in parts:
            plan = part.plan()
            assert all(parent < place for place, parent in enumerate(plan.parents))
            tree = part.session.tree
            for node, token, parent in zip(plan.nodes, plan.tokens, plan.parents, strict=True):
                if node >= 0:
                    assert tree.token(node) == token
                    assert tree.parent(node) == (plan.nodes[parent] if parent >= 0 else tree.root)
            for places in part.recycled:
                assert [plan.nodes[place] for place in places] == [-1] * len(places)
                assert [plan.parents[place] for place in places[1:]] == list(places[:-1])


def test_one_node_more_is_always_the_likeliest_of_those_left_trees_and_what_is_offered_again_together() -> None:
    random, recycling = Random(5), Recycling()
    log_on = math.log(recycling.goes_on)
    for _ in range(12):
        ones = [session(random, 40, words=9) for _ in range(5)]
        for one in ones:
            one.committed += [random.randrange(9) for _ in range(2)]
            one.tree.advance(one.committed[-2:])
            for number in range(40, 40 + random.randrange(3)):
                one.receive(Draft(1, 2, number, (number - 40,), (random.randrange(9),), bytes([random.choice((0, 9))])))
        counted = [(one, -random.random(), math.log(0.02)) for one in ones]
        parts = [Part(*each) for each in counted]
        assert choose(parts, free(1000), 5.0, recycling) == -math.inf
        counts = list[float]()
        for part in parts:
            plan, of = part.plan(), dict[int, float]()
            first = {chain[0]: number for number, chain in enumerate(part.recycled)}
            for place, (node, parent) in enumerate(zip(plan.nodes, plan.parents, strict=True)):
                if node >= 0:
                    of[place] = part.counts + part.session.tree.reach(node)
                elif place in first:
                    of[place] = of.get(parent, part.counts) + math.log(recycling.chances[first[place]])
                else:
                    of[place] = of[parent] + log_on
            counts += of.values()
        assert 0 < sum(len(part.recycled) for part in parts) < len(counts)
        for most, least in enumerate(sorted(counts, reverse=True)[:-1], 1):
            assert choose([Part(*each) for each in counted], free(most), 5.0, recycling) == pytest.approx(least)


def test_a_backups_nodes_are_not_what_the_edge_promised() -> None:
    one = session(Random(0), 0)
    one.receive(Draft(1, 0, 0, (0, 1), (5, 6), bytes((0, 0))))
    node = one.tree.add(one.tree.likeliest(9)[-1], 7, math.log(0.5))
    part = Part(one, math.log(0.25), others={node})
    choose([part], free(9), 1.0)
    assert part.plan().tokens == (5, 6, 7)
    assert part.promised == pytest.approx(2.0)

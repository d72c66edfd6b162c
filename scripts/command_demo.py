"""`paceline demo`: one answer, plainly and with a policy, over a delayed link, and what happened."""

import json
from typing import Annotated

import typer
from paceline.scripts import options


def demo(
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="What to ask.")],
    policy: options.PolicyName = "stream",
    rule: options.Rule = "coupled",
    rtt: options.RoundTrip = 0.05,
    verify_floor: options.VerifyFloor = 0.03,
    max_tokens: options.MaxTokens = 96,
    pair: options.Pair = "smollm2",
    target: options.Target = None,
    draft: options.Draft = None,
    engine: options.Engine = "llamacpp",
    exact: options.Exact = False,
    quant: options.Quant = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    threads: options.Threads = None,
    provider: options.Provider = None,
    width: Annotated[int | None, typer.Option(min=0, help="Drafted nodes verified in a step, at most.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Run a verifier and an edge as two processes, with a delay on the link, and compare with plain decoding."""
    import asyncio

    from paceline.edge.policies import policy as policy_named
    from paceline.edge.policies import with_rule
    from paceline.protocol.errors import PacelineError
    from paceline.scripts.comparison import Question, as_lines, compare
    from paceline.scripts.local import local_verifier
    from paceline.scripts.pairs import files_of, vocabulary_of

    policy = with_rule(policy, rule)
    chosen = policy_named(policy)
    if not prompt.strip():
        raise PacelineError("the prompt is empty")
    params = options.sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    files = files_of(pair, target, draft)
    arguments = ["--model", str(files.target), "--engine", engine, "--verify-floor", str(verify_floor)]
    arguments += ["--threads", str(threads)] if threads else []
    arguments += ["--exact"] if exact else []
    arguments += ["--quant", quant] if quant else []
    arguments += ["--width", str(width)] if width is not None else []
    with local_verifier(arguments) as url:
        question = Question(prompt, params, max_tokens)
        vocabulary = vocabulary_of(files.target)
        result = asyncio.run(compare(url, vocabulary, files.draft, policy, question, rtt, threads, provider))
    result |= {"policy": policy, "rtt": rtt, "verify_floor": verify_floor, "seed": params.seed, "engine": engine}
    result["drawn"] = chosen.rule == "rejection" and not params.greedy
    typer.echo(json.dumps(result, ensure_ascii=False) if as_json else as_lines(result))

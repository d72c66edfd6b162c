"""`paceline cloud`: a verifier."""

from pathlib import Path
from typing import Annotated

import typer
from paceline.scripts import options


def cloud(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="The target: alias, GGUF file or hf:org/name:file.gguf.")] = "smollm2",
    engine: options.Engine = "llamacpp",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8765,
    context: Annotated[int, typer.Option(min=16, help="Tokens a session may hold, prompt and text.")] = 2048,
    slots: Annotated[int, typer.Option(min=1, help="Sessions in the engine at once.")] = 8,
    queue: Annotated[int, typer.Option(min=0, help="Sessions that may wait for a slot.")] = 256,
    connections: Annotated[int, typer.Option(min=1, help="Edges connected at once.")] = 1024,
    messages_a_second: Annotated[float, typer.Option(help="Frames of one key; no more are read.")] = 2000.0,
    idle_timeout: Annotated[float, typer.Option(help="Seconds without a frame that end a connection.")] = 120.0,
    threads: options.Threads = None,
    gpu_layers: Annotated[int, typer.Option(help="Layers that llama.cpp puts on a GPU.")] = 0,
    device: options.Device = "auto",
    exact: options.Exact = False,
    quant: options.Quant = None,
    vllm_args: Annotated[
        str, typer.Option(help="vllm: its own options, as in '--tensor-parallel-size 2 --dtype bfloat16'.")
    ] = "",
    width: Annotated[int | None, typer.Option(min=0, help="Drafted nodes verified in a step, at most.")] = None,
    verify_floor: options.VerifyFloor = 0.0,
    backup: Annotated[
        str, typer.Option(help="What drafts here where an edge has sent too little: none, ngram, draft or both.")
    ] = "none",
    backup_draft: Annotated[
        str | None,
        typer.Option(help="The model of --backup draft or both; the one that goes with the target if not given."),
    ] = None,
    ngrams: Annotated[
        Path | None,
        typer.Option(
            help="What the target is known to write, from `paceline draft ngrams`, for --backup ngram or both."
        ),
    ] = None,
    session_ttl: Annotated[float, typer.Option(min=0, help="Seconds that a session outlives its connection.")] = 60.0,
    drain_timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds that running sessions get to end after SIGTERM; a second one ends at once."),
    ] = 30.0,
    keys: Annotated[Path | None, typer.Option(help="File of bearer keys, a name and a key on each line.")] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Certificate chain: serve wss:// instead of ws://.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, if it is not in the same file.")] = None,
    tls_clients: Annotated[
        Path | None, typer.Option(help="Authority that must have signed an edge's certificate.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="text or json, one object a line.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    otel: Annotated[
        bool, typer.Option("--otel", help="Send OpenTelemetry spans, to where OTEL_EXPORTER_OTLP_ENDPOINT says.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(envvar="PACELINE_CLOUD_CONFIG", help="TOML file of settings; flags and environment win."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Show the settings as they are in force, and stop.")] = False,
    keep_order: Annotated[bool, typer.Option(hidden=True)] = True,
    stop_with_stdin: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve a target to edges: verify what they draft, commit what the target chooses.

    Every option can be a variable too (PACELINE_CLOUD_DRAIN_TIMEOUT=60), or a line of a file (drain_timeout = 60).
    """
    import asyncio

    from paceline.cloud.keys import Keys
    from paceline.cloud.logs import set_up
    from paceline.cloud.serve import check_engine, load_engine, serve
    from paceline.cloud.server import tls_context
    from paceline.cloud.settings import Settings, effective, listing
    from paceline.protocol.errors import PacelineError
    from paceline.scripts.local import READY, when_stdin_ends
    from paceline.scripts.models import cache_folder, resolve
    from paceline.scripts.pairs import backups_of, vocabulary_of
    from paceline.scripts.progress import progress_bar

    given = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    settings, sources = effective({name: ctx.params[name] for name in given & Settings.model_fields.keys()}, config)
    if check:
        check_engine(settings)
        typer.echo(listing(settings, sources))
        if settings.keys is not None:
            typer.echo(f"# {settings.keys} holds {len(Keys(settings.keys))} keys")
        if settings.tls_certificate is not None:
            tls_context(settings.tls_certificate, settings.tls_key, settings.tls_clients)
        return
    set_up(settings.log_format, settings.log_level)
    if settings.engine == "toy":
        path = None
    else:
        with progress_bar(settings.model) as report:
            path = resolve(settings.model, cache_folder(), report)
    if settings.engine == "vllm":
        from paceline.cloud.vllm.launch import launch

        assert path is not None
        if stop_with_stdin:
            raise PacelineError("vLLM is started by `paceline cloud --engine vllm`, and named with --url")
        launch(settings, path)
    loaded = load_engine(settings, path)
    if not getattr(loaded, "exact", True):
        warning = (
            "rows of this model depend on the batch they run in: at near ties the text may differ from plain decoding"
        )
        typer.echo(f"paceline: {warning}", err=True)
    vocabulary = vocabulary_of(path) if path is not None else None
    top_ups = backups_of(settings, loaded)

    def ready(address: str) -> None:
        print(f"{READY}{address}", flush=True)

    asyncio.run(
        serve(settings, loaded, vocabulary, ready, watch=when_stdin_ends if stop_with_stdin else None, top_ups=top_ups)
    )

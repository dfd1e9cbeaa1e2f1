"""The command line. Everything that needs torch is imported when a verb runs."""

from __future__ import annotations

import json
import os
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from types import FrameType
from typing import Any

import typer

from hotcold.config import help_texts
from hotcold.config.sources import read_arguments
from hotcold.errors import DiskError, InputError, NotAvailableError, did_you_mean, shown
from hotcold.files import OF_THE_DISK
from hotcold.stopping import Stopped

VERBS = ("train", "eval", "sample", "verify", "bench", "doctor", "demo")
LATER_VERBS = ("report", "view", "compare", "export", "import")
MAX_LINES = 5  # of an error

# Help is ours (`help_texts`), and KEY=VALUE and --KEY VALUE are read by `config.sources`, not by typer.
_OURS: dict[str, Any] = {"help_option_names": [], "allow_extra_args": True, "ignore_unknown_options": True}
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": []},
)


def main() -> None:
    """Entry point of the `hotcold` command."""
    words = sys.argv[1:]
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        _exit(_guarded(lambda: _no_verb(words[0]), debug=False))
    app(prog_name="hotcold")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version"),
    show_help: bool = typer.Option(False, "--help"),
) -> None:
    if version:
        _exit(_guarded(_print_version, debug=False))
    if show_help or context.invoked_subcommand is None:
        _exit(_guarded(lambda: _print(help_texts.ROOT), debug=False))


@app.command(context_settings=_OURS)
def train(
    context: typer.Context,
    dry_run: bool = typer.Option(False, "--dry-run"),
    debug: bool = typer.Option(False, "--debug"),
    show_help: bool = typer.Option(False, "--help"),
) -> None:
    _verb(lambda: _train(context.args, dry_run), help_texts.train_help, show_help, debug)


@app.command("eval", context_settings=_OURS)
def evaluate(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json"),
    debug: bool = typer.Option(False, "--debug"),
    show_help: bool = typer.Option(False, "--help"),
) -> None:
    _verb(lambda: _evaluate(context.args, as_json), help_texts.eval_help, show_help, debug)


@app.command(context_settings=_OURS)
def sample(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json"),
    debug: bool = typer.Option(False, "--debug"),
    show_help: bool = typer.Option(False, "--help"),
) -> None:
    _verb(lambda: _sample(context.args, as_json), help_texts.sample_help, show_help, debug)


@app.command(context_settings=_OURS)
def verify(
    context: typer.Context,
    everything: bool = typer.Option(False, "--all"),
    chapter: bool = typer.Option(False, "--chapter"),
    on_model: bool = typer.Option(False, "--on-model"),
    as_json: str | None = typer.Option(None, "--json"),
    html: str | None = typer.Option(None, "--html"),
    markdown: str | None = typer.Option(None, "--markdown"),
    debug: bool = typer.Option(False, "--debug"),
    show_help: bool = typer.Option(False, "--help"),
) -> None:
    options = {"everything": everything, "chapter": chapter, "on_model": on_model}
    outputs = {"json": as_json, "html": html, "markdown": markdown}
    _verb(lambda: _verify(context.args, {**options, **outputs}), lambda: help_texts.VERIFY, show_help, debug)


@app.command(context_settings=_OURS)
def bench(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json"),
    debug: bool = typer.Option(False, "--debug"),
    show_help: bool = typer.Option(False, "--help"),
) -> None:
    _verb(lambda: _bench(context.args, as_json), help_texts.bench_help, show_help, debug)


@app.command(context_settings=_OURS)
def doctor(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json"),
    debug: bool = typer.Option(False, "--debug"),
    show_help: bool = typer.Option(False, "--help"),
) -> None:
    _verb(lambda: _doctor(context.args, as_json), lambda: help_texts.DOCTOR, show_help, debug)


@app.command(context_settings=_OURS)
def demo(
    context: typer.Context,
    debug: bool = typer.Option(False, "--debug"),
    show_help: bool = typer.Option(False, "--help"),
) -> None:
    _verb(lambda: _demo(context.args), lambda: help_texts.DEMO, show_help, debug)


def _verb(body: Callable[[], int | None], help_text: Callable[[], str], show_help: bool, debug: bool) -> None:
    _exit(_guarded((lambda: _print(help_text())) if show_help else body, debug))


# ---- the verbs


def _train(tokens: Sequence[str], dry_run: bool) -> None:
    from hotcold.config.schema import train_config

    config = train_config(tokens)
    _warn(config)
    from hotcold import launch

    if dry_run:
        _print(launch.dry_run(config))
    else:
        launch.train(config, _echo)


def _evaluate(tokens: Sequence[str], as_json: bool) -> None:
    from hotcold.config.schema import eval_config

    config = eval_config(tokens)
    from hotcold import launch

    results = launch.evaluate(config)
    _print(json.dumps(results, indent=2, ensure_ascii=False) if as_json else _table(results))


def _sample(tokens: Sequence[str], as_json: bool) -> None:
    from hotcold.config.schema import sample_config

    config = sample_config(tokens)
    from hotcold import launch

    prompt = None
    for row in launch.sample(config):
        if as_json:
            _print(json.dumps(row, ensure_ascii=False))
            continue
        if row["prompt"] != prompt:
            prompt = row["prompt"]
            _print(f"prompt: {prompt}")
        cut = " [cut at max_tokens]" if row.get("finish_reason") == "length" else ""
        _print(f"response: {row['response']}{cut}")


def _verify(tokens: Sequence[str], options: dict[str, Any]) -> int:
    from hotcold.verify.command import Options
    from hotcold.verify.command import verify as run_verify

    return run_verify(tokens, Options(**options), _print, lambda text: print(f"hotcold: {text}", file=sys.stderr))


def _bench(tokens: Sequence[str], as_json: bool) -> None:
    from hotcold.config.schema import train_config

    config = train_config(tokens)
    _warn(config)
    from hotcold.bench.command import bench as run_bench
    from hotcold.bench.report import as_text

    measured = run_bench(config, lambda text: print(text, file=sys.stderr, flush=True))
    _print(json.dumps(measured.as_json(), indent=2, ensure_ascii=False) if as_json else as_text(measured))


def _doctor(tokens: Sequence[str], as_json: bool) -> int:
    from hotcold.doctor.command import doctor as run_doctor

    return run_doctor(tokens, as_json, _print, lambda text: print(f"hotcold: {text}", file=sys.stderr, flush=True))


def _demo(tokens: Sequence[str]) -> int:
    words, keys = read_arguments(tokens)
    unknown = [*words, *(key for key in keys if key not in ("seed", "run"))]
    if unknown:
        raise InputError(f"{unknown[0]!r} is not understood: hotcold demo takes seed=0 and run=NAME.")
    seed = keys["seed"].value if "seed" in keys else 0
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed={seed}: a whole number is needed, 0 or more.")
    from hotcold.demo import demo as run_demo

    return run_demo(seed, keys["run"].value if "run" in keys else None)


def _no_verb(word: str) -> None:
    if word in LATER_VERBS:
        raise NotAvailableError(f"hotcold {word} is not available yet. There are: {', '.join(VERBS)}.")
    hint = did_you_mean(word, list(VERBS))
    example = "" if hint else " For example: hotcold train grpo model=smollm2 data=prompts.jsonl reward=reward.py"
    raise InputError(f"there is no verb {word!r}.{hint} There are: {', '.join(VERBS)}.{example}")


def _print_version() -> None:
    _print(f"hotcold {metadata.version('hotcold')}")


# ---- printing


def _warn(config: Any) -> None:
    for warning in config.warnings:
        print(f"hotcold: warning: {warning}", file=sys.stderr)


def _print(text: str) -> None:
    print(text.rstrip("\n"), flush=True)


def _echo(text: str) -> None:
    """Progress. A reader that goes away (`| head`) does not stop a run that may have taken hours."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _forget_stdout()


def _forget_stdout() -> None:
    """Whatever is still buffered goes nowhere, quietly, also when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _table(results: dict[str, Any], prefix: str = "") -> str:
    lines = []
    for name, value in results.items():
        if isinstance(value, dict):
            lines.append(_table(value, f"{prefix}{name}/"))
        else:
            lines.append(f"{prefix + name:<32} {_rounded(value)}")
    return "\n".join(lines)


def _rounded(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_rounded(item) for item in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


# ---- how a verb ends


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _exit(code: int) -> None:
    raise typer.Exit(code) if code == 0 else SystemExit(code)


def _guarded(body: Callable[[], int | None], debug: bool) -> int:
    """The exit code of `body`: its own, or what its exception stands for."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return body() or 0
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except KeyboardInterrupt as stop:
        _complain("stopped.", debug)
        return stop.exit_code if isinstance(stop, Stopped) else 130
    except InputError as error:
        _complain(str(error), debug)
        return 2
    except Exception as error:
        return _unexpected(error, debug)
    finally:
        signal.signal(signal.SIGTERM, before)


def _unexpected(error: Exception, debug: bool) -> int:
    if isinstance(error, DiskError):
        _complain(str(error.strerror), debug)
        return 75
    if isinstance(error, OSError) and error.errno in OF_THE_DISK:
        place = f" ({error.filename})" if error.filename else ""
        _complain(f"{error.strerror}{place}. A run continues from its last checkpoint with resume=FOLDER.", debug)
        return 75
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join(str(error).split())[:300]
    if own := [frame for frame in frames if _is_users(frame.filename)]:
        _complain(f"{type(error).__name__}: {text} ({own[-1].filename}:{own[-1].lineno})", debug)
        return 2
    last = frames[-1]
    _complain(
        f"{type(error).__name__}: {text} ({os.path.basename(last.filename)}, line {last.lineno})\n"
        "This is a bug in hotcold; run again with --debug for the traceback.",
        debug,
    )
    return 1


def _is_users(filename: str) -> bool:
    """Whether a file is the user's: not ours, not Python's, not an installed package's."""
    libraries = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    ours = os.path.dirname(os.path.abspath(__file__))
    inside = [*libraries, ours, os.path.dirname(sys.executable)]
    return os.path.isfile(filename) and not any(
        os.path.abspath(filename).startswith(folder + os.sep) for folder in inside
    )


def _complain(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"hotcold: {shown(message, MAX_LINES)}", file=sys.stderr, flush=True)

"""`import hotcold`, `--help` and a mistyped key answer at once: neither torch nor transformers is imported."""

import subprocess
import sys
import time
from pathlib import Path

HEAVY = ("torch", "transformers", "pyarrow", "numpy", "datasets")
SHOW_HEAVY = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"


def heavy_after(code: str) -> str:
    """Which heavy modules a fresh interpreter has loaded after `code`, as printed in its last line."""
    done = subprocess.run([sys.executable, "-c", f"{code}\n{SHOW_HEAVY}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def after_command(*words: str) -> str:
    return heavy_after(
        f"import sys\nsys.argv = ['hotcold', *{words!r}]\nfrom hotcold.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass"
    )


def test_importing_the_package_and_naming_its_version_loads_nothing_heavy() -> None:
    assert heavy_after("import hotcold; hotcold.__version__; dir(hotcold)") == "[]"


def test_building_a_config_in_python_loads_nothing_heavy() -> None:
    code = "import hotcold; hotcold.Config.from_keys(algorithm='grpo', model='m', data='d.jsonl', reward='r.py')"
    assert heavy_after(code) == "[]"


def test_help_of_the_program_and_of_every_verb_loads_nothing_heavy() -> None:
    assert after_command("--help") == "[]"
    for verb in ("train", "eval", "sample", "bench", "doctor", "demo"):
        assert after_command(verb, "--help") == "[]", verb


def test_a_wrong_key_is_answered_before_anything_heavy_is_loaded() -> None:
    assert after_command("train", "grpo", "model=m", "data=d.jsonl", "reward=r.py", "stepz=5") == "[]"


def test_help_takes_less_than_a_second() -> None:
    program = Path(sys.executable).with_name("hotcold")
    times = []
    for _ in range(3):  # the best of three: another process may hold the processor
        start = time.perf_counter()
        subprocess.run([program, "train", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0

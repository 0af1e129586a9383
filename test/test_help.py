"""`--help` of the users' commands: it begins with an example that works, and its flags stand in groups."""

import re
import shlex
import subprocess
import sys
from functools import cache

import pytest
from commands import run
from places import ROOT

SCRIPTS = ROOT / "scripts"
# in this order: compile.py makes what the others' examples name
COMMANDS = ["compile", "generate", "validate", "inspect_layers", "benchmark", "plan", "acceptance", "batch"]
# their examples need a GGUF file, which test_import_faults.py makes, and Ray with a device: vllm/test_ray_serving.py
NOT_RUN = ["import_checkpoint", "serve"]
WITHOUT_FLAGS = "import_checkpoint"
HELPERS = {"bisection", "common", "engines", "svg", "variants"}


@cache
def help_of(command: str) -> str:
    """What `python scripts/COMMAND.py --help` prints, in a process of its own as its user starts it."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{command}.py", "--help"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the commands in it, as a checkout has them."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "scripts").symlink_to(SCRIPTS)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "max_tokens": 1}')
    return folder


def test_every_command_is_tested():
    assert {file.stem for file in SCRIPTS.glob("*.py")} == {*COMMANDS, *NOT_RUN, *HELPERS}


@pytest.mark.parametrize("command", COMMANDS + NOT_RUN)
def test_help(command):
    example, *lines = help_of(command).splitlines()
    assert example.startswith(f"example: python scripts/{command}.py ")
    titles = [line for line in lines if re.fullmatch(r"[^ ].*:", line)]
    own = [title for title in titles if title not in ("options:", "positional arguments:")]
    assert own or command == WITHOUT_FLAGS, "no group of flags has a title of its own"
    ungrouped = help_of(command).split("\noptions:\n")[1].split("\n\n")[0]
    assert re.findall(r"--[a-z-]+", ungrouped) == ["--help"], ungrouped


@pytest.mark.parametrize("command", COMMANDS)
def test_example(command, folder):
    python, script, *args = shlex.split(help_of(command).splitlines()[0].removeprefix("example: "))
    done = run(folder / script, *args, cwd=folder, timeout=500, HF_HUB_OFFLINE="1")
    assert done.returncode == 0 and done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def test_accept_sh_has_its_example():
    """test_accept.py runs accept.sh with the very arguments, but for the folder of results."""
    help_text = subprocess.run(["bash", SCRIPTS / "accept.sh", "--help"], capture_output=True, text=True).stdout
    assert help_text.startswith(
        "example: scripts/accept.sh --device cpu --model tiny --tp 1 --seq-len 64 --dtype float32\n"
    )

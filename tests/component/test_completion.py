"""The completion of real shells, by the tree's own ``brine``."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
SYSTEM = TREE / "pkgs/common/system"

_BRINE = """#!{python}
import sys
sys.path[:0] = {path!r}
from brine.common import cli
from brine.instance import cli as instance
from brine.hotplug import cli as hotplug
nouns = {{"instance": lambda: instance.COMMAND, "tap": lambda: hotplug.TAP}}
sys.exit(cli._print_completions(sys.argv[2:], nouns))
"""

_BASH = """
. /usr/share/bash-completion/bash_completion
. {system}/brine.bash-completion
COMP_WORDS=({words}) COMP_CWORD={last} COMP_LINE={line} COMP_POINT={length}
_brine brine {current} {before}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

# A shell of zsh's in a terminal of its own, whose widget writes down what it would offer.
_ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PROMPT= RPROMPT= PATH='{path}':$PATH; fpath=('{system}' $fpath)'
zpty -w shell 'autoload -Uz compinit; compinit -u -d '{folder}'/dump'
zpty -w shell 'zstyle ":completion:*" list-grouped false; LISTMAX=1000'
zpty -w shell 'compadd () {{ local -a hits; [[ ${{@[1,(i)(-|--)]}} == *-(O|A|D)\\ * ]] || {{ \
builtin compadd -A hits "$@"; print -l -- $hits >>'{folder}'/hits }}; builtin compadd "$@" }}'
zpty -w shell 'ended () {{ : >'{folder}'/ended; zle send-break }}; zle -N ended; bindkey "^X" ended'
zpty -w shell 'bindkey "^I" complete-word; : >'{folder}'/ready'
wait_for () {{
    until [[ -e {folder}/$1 || $((++tries)) -gt 999 ]]; do zpty -rt shell _; sleep 0.1; done
}}
wait_for ready
zpty -n -w shell {line}$'\\t\\C-x'
wait_for ended
zpty -d shell
cat {folder}/hits
"""


@pytest.fixture
def complete(tmp_path: Path) -> Callable[[str, str], set[str]]:
    """What a shell offers for a line."""
    program = tmp_path / "bin/brine"
    program.parent.mkdir()
    path = [str(one) for one in (TREE / "pkgs").iterdir()]
    program.write_text(_BRINE.format(python=sys.executable, path=path))
    program.chmod(0o755)
    for name in ("alpha.json", "beta.json"):
        (tmp_path / name).touch()

    def run(shell: str, line: str) -> set[str]:
        words = line.split(" ")
        filled = {
            "system": shlex.quote(str(SYSTEM)),
            "folder": shlex.quote(str(tmp_path)),
            "path": shlex.quote(str(program.parent)),
            "words": " ".join(map(shlex.quote, words)),
            "last": len(words) - 1,
            "line": shlex.quote(line),
            "length": len(line),
            "current": shlex.quote(words[-1]),
            "before": shlex.quote(words[-2]),
        }
        scripts = {
            "bash": ["bash", "--norc", "-c", _BASH.format(**filled)],
            "zsh": ["zsh", "-f", "-c", _ZSH.format(**filled)],
            "fish": ["fish", "--no-config", "-c", f"complete -C {shlex.quote(line)}"],
        }
        if shell == "fish":
            scripts["fish"][2:2] = ["-C", f"source {SYSTEM}/brine.fish"]
        environment = {
            "PATH": f"{program.parent}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "TERM": "xterm",
            "LANG": "C.UTF-8",
        }
        done = subprocess.run(
            scripts[shell],
            env=environment,
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=300,
            check=False,
        )
        found = {row.partition("\t")[0] for row in done.stdout.splitlines()}
        assert found or not done.stderr, done.stderr
        return found - {""}

    return run


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("brine ", {"instance", "tap"}),
        ("brine instance re", {"reboot", "rename", "resume"}),
        ("brine instance stop --par", {"--parallel"}),
        ("brine instance import x --accel ", {"kvm", "tcg"}),
        ("brine instance define al", {"alpha.json"}),
    ],
)
def test_what_shells_offer(
    complete: Callable[[str, str], set[str]], shell: str, line: str, words: set[str]
) -> None:
    assert complete(shell, line) == words

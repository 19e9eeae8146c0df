#!/bin/sh
# Makes .venv with flowalign as editable and its dev tools; does nothing when that is done already.
#   FLOWALIGN_PYTHON (or PYTHON)  interpreter, default python3
#   FLOWALIGN_TORCH               what pip is asked for, default torch==2.13.0
#   FLOWALIGN_LOCK                versions to install, default requirements.lock; /dev/null = the newest
set -eu
cd "$(dirname "$0")/.."
python=${FLOWALIGN_PYTHON:-${PYTHON:-python3}}
torch=${FLOWALIGN_TORCH:-torch==2.13.0}
lock=${FLOWALIGN_LOCK:-requirements.lock}
venv=.venv
stamp=$venv/.flowalign-setup
want=$(cat pyproject.toml scripts/setup.sh "$lock" | cksum)

[ -x $venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$want" ] && exit 0

fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }
say() { printf 'setup: %s\n' "$@"; }
pip() { $venv/bin/python -m pip --disable-pip-version-check "$@"; }

if ! $venv/bin/python -m pip --version >/dev/null 2>&1; then
    command -v "$python" >/dev/null || fail "no '$python' on the PATH. Install Python 3.10 or newer," \
        "or name one: FLOWALIGN_PYTHON=/path/to/python3 make ..."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail \
        "$("$python" --version) is too old, flowalign needs 3.10 or newer." \
        "Name another: FLOWALIGN_PYTHON=/path/to/python3 make ..."
    "$python" -c 'import venv, ensurepip' 2>/dev/null || fail \
        "$python cannot make virtual environments (no venv or ensurepip)." \
        "On Debian and Ubuntu: apt install python3-venv"
    say "creating $venv with $("$python" --version)"
    "$python" -m venv --clear $venv
fi

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }
cpu_wheel_visible() { # pip would pick a build marked +cpu by itself (--find-links, a mirror)
    pip install --dry-run --no-deps --ignore-installed --quiet --report - "$torch" 2>/dev/null |
        grep -Eq '"version": *"[^"]*\+cpu"'
}
cpu_index() {
    pip install --index-url https://download.pytorch.org/whl/cpu --timeout 15 --retries 0 "$torch"
}

# uv installs from where pip would (its settings are handed over), in a tenth of pip's time; where it cannot, pip does
pip_settings() {
    pip config list 2>/dev/null | sed -n "s/^.*\.\(index-url\|extra-index-url\|find-links\|constraint\)='\(.*\)'\$/\1 \2/p" |
        sed 's/\\n/ /g' | while read -r key values; do for value in $values; do echo "--$key $value"; done; done
}
uv() { # install
    [ -x $venv/bin/uv ] || pip install --quiet --only-binary :all: uv || return
    # shellcheck disable=SC2046 # two words each
    $venv/bin/uv pip install --quiet --python $venv/bin/python --index-strategy unsafe-best-match \
        $(pip_settings) "$@"
}
install() { uv "$@" || pip install --quiet "$@"; }

if $venv/bin/python -c 'from importlib.metadata import version; version("torch")' 2>/dev/null; then
    :
elif [ "$(uname -s)" != Linux ] || has_gpu; then
    say "installing torch"
    pip install "${FLOWALIGN_TORCH:-torch>=2.6}"
elif cpu_wheel_visible; then
    say "no NVIDIA GPU: installing the CPU build of torch that pip sees"
    install "$torch"
else
    say "no NVIDIA GPU: installing torch from https://download.pytorch.org/whl/cpu"
    if ! cpu_index; then
        say "WARNING: that index cannot be reached; taking torch from the default index." \
            "WARNING: on Linux this may bring several GB of CUDA libraries that stay unused here."
        pip install "$torch"
    fi
fi
torch_is() { $venv/bin/python -c "from importlib.metadata import version; v = version('torch').split('+')[0]; print($1)"; }
locked() { # install in the versions of the lock; without it where another Python or index lacks them
    install --constraint "$lock" "$@" && return
    say "WARNING: the versions of $lock cannot all be had here; taking the newest."
    pip install --quiet "$@"
}
say "installing flowalign and its dev tools"
# what an earlier checkout installed under the import name, which is another project's on PyPI
$venv/bin/python -c 'from importlib.metadata import version; version("flowalign")' 2>/dev/null && pip uninstall --quiet --yes flowalign
locked -e '.[dev]' "torch==$(torch_is v)"
# open_clip beside the environment, for tests/conftest.py: it needs torchvision, whose build on PyPI is
# for CUDA, and a torchvision that cannot be imported stops transformers and diffusers
locked --upgrade --no-deps --target $venv/open_clip open-clip-torch ftfy wcwidth \
    "torchvision==$(torch_is "f'0.{int(v.split(chr(46))[1]) + 15}.*'")"
# pip compiles what it installs, and uv does not: what all commands import is compiled once
env -u PYTHONDONTWRITEBYTECODE PYTHONPATH="$PWD:$PWD/tests" $venv/bin/python -W ignore -c \
    'import fakes, flowalign.eval.evaluation, flowalign.commands.cli, pytest, fastapi, uvicorn' 2>/dev/null || :
echo "$want" >$stamp

#!/bin/sh
# Makes a virtual environment on the newest supported interpreter that runs, and installs enginebay in it.
#
#   tools/setup_env.sh [--venv DIR] [--python X.Y] [--wheel FILE] [--with REQUIREMENT] [--find] [EXTRA,EXTRA]
#
#   --venv DIR       where (default .venv beside pyproject.toml)
#   --python X.Y     this version only
#   --wheel FILE     install this wheel instead of the working tree
#   --with SPEC      install this requirement too (a name, a wheel or a folder; may be repeated)
#   --find           print the interpreter that would be used, and end
#   PYTHON=...       this interpreter, whatever else there is
#
# A second call with nothing changed does nothing. Extras add up: asking for fewer never removes any.
set -eu

VERSIONS="3.13 3.12 3.11"
STAMP_NAME=.enginebay-setup
ROOT=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
NEWLINE='
'

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 2; }

# Runs its code only where a virtual environment can be made: a version manager's shim that has no
# interpreter behind it fails here, and so does a system Python whose ensurepip was split off. Of an activated
# environment it names the interpreter behind it: the environment may be the one that is about to be replaced.
PROBE='
import ensurepip, os, platform, ssl, sys, sysconfig, venv
if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
path = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
print("%d.%d %s" % (*sys.version_info[:2], path))
'

# probe VERSION COMMAND: prints the path of the interpreter behind COMMAND if it runs and has that version.
probe() {
    answer=$("$2" -I -c "$PROBE" 2>/dev/null) || return 1
    [ "${answer%% *}" = "$1" ] || return 1
    printf '%s\n' "${answer#* }"
}

# candidates VERSION: one command a line. uv knows interpreters that PATH does not, every folder of PATH is
# looked at since a shim may hide a real interpreter behind it, and pyenv keeps versions that no shim answers for.
candidates() {
    if command -v uv >/dev/null 2>&1; then
        uv python find --no-project "$1" 2>/dev/null || true
    fi
    for name in "python$1" python3 python; do
        old_ifs=$IFS; IFS=:
        for folder in $PATH; do
            if [ -x "$folder/$name" ] && [ ! -d "$folder/$name" ]; then printf '%s\n' "$folder/$name"; fi
        done
        IFS=$old_ifs
    done
    pyenv_root=$(pyenv root 2>/dev/null || printf '%s' "${PYENV_ROOT:-${HOME:-}/.pyenv}")
    for command in "$pyenv_root"/versions/"$1".*/bin/python; do
        if [ -x "$command" ]; then printf '%s\n' "$command"; fi
    done
}

# find_interpreter: sets VERSION and INTERPRETER to the newest one that runs.
find_interpreter() {
    for VERSION in ${ONLY_VERSION:-$VERSIONS}; do
        if [ -n "${PYTHON:-}" ]; then
            found=$(command -v "$PYTHON" || true)
        else
            found=$(candidates "$VERSION")
        fi
        old_ifs=$IFS; IFS=$NEWLINE
        for command in $found; do
            IFS=$old_ifs
            if INTERPRETER=$(probe "$VERSION" "$command"); then return 0; fi
        done
        IFS=$old_ifs
    done
    if [ -n "${PYTHON:-}" ]; then
        fail "PYTHON=$PYTHON is no interpreter of ${ONLY_VERSION:-$VERSIONS} that runs with venv and ensurepip; name another, or unset PYTHON to search"
    fi
    fail "no CPython of ${ONLY_VERSION:-$VERSIONS} that runs with venv and ensurepip was found by uv, on PATH or in pyenv; install one (for example: uv python install 3.13) or set PYTHON=/path/to/python"
}

# stamp_value KEY: what the environment's stamp says.
stamp_value() { sed -n "s/^$1=//p" "$STAMP" 2>/dev/null || true; }

write_stamp() {
    printf '%s\n' "interpreter=$INTERPRETER" "version=$VERSION" "folder=$VENV" "inputs=$1" "extras=$2" >"$STAMP"
}

# union A B: both comma lists as one, each name once, sorted.
union() { printf '%s,%s' "$1" "$2" | tr ',' '\n' | sed '/^$/d' | LC_ALL=C sort -u | paste -s -d, -; }

inputs_hash() {
    { cat "$ROOT/pyproject.toml" "$ROOT/tools/setup_env.sh"; if [ -n "$WHEEL" ]; then cksum "$WHEEL"; fi
      printf '%s' "$WITH"; } | cksum | tr ' ' '-'
}

VENV=$ROOT/.venv; ONLY_VERSION=; WHEEL=; WITH=; FIND=; EXTRAS=
while [ $# -gt 0 ]; do
    case $1 in
        --venv) VENV=$2; shift 2 ;;
        --python) ONLY_VERSION=$2; shift 2 ;;
        --wheel) WHEEL=$2; shift 2 ;;
        --with) WITH=$WITH$2$NEWLINE; shift 2 ;;
        --find) FIND=yes; shift ;;
        -*) fail "unknown option $1; see the first lines of tools/setup_env.sh" ;;
        *) EXTRAS=$1; shift ;;
    esac
done
case $VENV in
    /*) ;;
    *) VENV=$PWD/$VENV ;;
esac
case " $VERSIONS " in
    *" ${ONLY_VERSION:-3.13} "*) ;;
    *) fail "--python $ONLY_VERSION is not supported; one of $VERSIONS is" ;;
esac
if [ -n "$WHEEL" ] && [ ! -f "$WHEEL" ]; then fail "there is no wheel $WHEEL; make one with: make wheel"; fi

if [ -n "$FIND" ]; then
    find_interpreter
    printf '%s\n' "$INTERPRETER"
    exit 0
fi

STAMP=$VENV/$STAMP_NAME
INPUTS=$(inputs_hash)
HAVE=$(stamp_value extras)
WANT=$(union "$HAVE" "$EXTRAS")

# An environment that was moved does not run: its scripts name the folder that it was made in.
runs() { [ "$(stamp_value folder)" = "$VENV" ] && "$VENV/bin/python" -c pass 2>/dev/null; }

# Up to date: nothing is searched, since make comes through here on every call.
if [ -z "${PYTHON:-}" ] && [ "$(stamp_value inputs)" = "$INPUTS" ] && [ "$WANT" = "$HAVE" ] && runs; then
    if [ -z "$ONLY_VERSION" ] || [ "$(stamp_value version)" = "$ONLY_VERSION" ]; then exit 0; fi
fi

find_interpreter
if [ "$(stamp_value interpreter)" = "$INTERPRETER" ] && runs; then
    if [ "$(stamp_value inputs)" = "$INPUTS" ] && [ "$WANT" = "$HAVE" ]; then exit 0; fi
elif [ -e "$VENV" ] && [ ! -e "$STAMP" ]; then
    fail "$VENV exists and was not made by this script; remove it, or choose another folder with --venv"
else
    rm -rf -- "$VENV"
    HAVE=; WANT=$(union "" "$EXTRAS")
    "$INTERPRETER" -m venv "$VENV"
    write_stamp unfinished ""
fi

say "Python $VERSION ($INTERPRETER) -> ${VENV#"$PWD/"}, enginebay${WANT:+[$WANT]}; the first time takes a few minutes"
if [ -n "$WHEEL" ]; then
    "$VENV/bin/python" -m pip uninstall -qq -y enginebay  # a rebuilt wheel of the same version is installed again
    set -- "$WHEEL${WANT:+[$WANT]}"
else
    set -- -e "$ROOT${WANT:+[$WANT]}"
fi
old_ifs=$IFS; IFS=$NEWLINE
for requirement in $WITH; do set -- "$@" "$requirement"; done
IFS=$old_ifs
# -qq: errors only. Python compiles the modules that are imported; to compile those of all packages takes pip longer than
# all else.
"$VENV/bin/python" -m pip install -qq --no-compile --disable-pip-version-check "$@" ||
    fail "installing failed; the lines above say what could not be had. The environment is finished by the next call."
write_stamp "$INPUTS" "$WANT"

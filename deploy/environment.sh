# Sourced by deploy/run and deploy/test: make .venv fit pyproject.toml and deploy/constraints.txt.
# Touches nothing outside the clone.

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 3
}

# The first usable Python 3.11 or later: GRADGATE_PYTHON if set, else the usual names.
find_python() {
    local candidate
    for candidate in ${GRADGATE_PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
                fail "$candidate has no venv module; install it (on Debian and Ubuntu: the package python3-venv)"
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later found (tried: ${GRADGATE_PYTHON:-python3.11 to python3.14, python3, python});" \
        "install one, or set GRADGATE_PYTHON to its path"
}

# What .venv must have been made from; another place, interpreter, pin or extra makes it anew.
describe_environment() {
    local python=$1 extra=$2
    printf 'extra %s\n' "$extra"
    printf 'at %s\n' "$PWD"
    "$python" -c 'import sys; print("python", sys.version)'
    cksum pyproject.toml deploy/constraints.txt
}

environment_fits() {
    local python=$1 extra stamp
    shift
    [[ -f .venv/gradgate-stamp ]] && .venv/bin/python -c '' 2>/dev/null || return 1
    stamp=$(<.venv/gradgate-stamp)
    for extra in "$@"; do
        [[ $stamp == "$(describe_environment "$python" "$extra")" ]] && return 0
    done
    return 1
}

# prepare_environment run|test: an environment with the test extra also serves `run`.
prepare_environment() {
    local extra=$1 python target=.
    python=$(find_python)
    [[ -w . ]] || fail "$PWD is not writable for $(id -un); clone the repository into a folder of yours"
    exec 9<deploy/constraints.txt # two runs in one clone take turns
    if command -v flock >/dev/null; then flock 9; fi
    if [[ $extra == run ]] && environment_fits "$python" run test; then
        :
    elif [[ $extra == test ]] && environment_fits "$python" test; then
        :
    else
        [[ $extra == test ]] && target='.[test]'
        printf 'Installing into %s/.venv (the first time takes a few minutes) ...\n' "$PWD" >&2
        rm -f .venv/gradgate-stamp
        if ! .venv/bin/python -c 'import sys; sys.exit(sys.argv[1:] != [sys.prefix, sys.version])' \
            "$PWD/.venv" "$("$python" -c 'import sys; print(sys.version)')" 2>/dev/null; then
            "$python" -m venv --clear .venv
        fi
        .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input \
            -c deploy/constraints.txt -e "$target" >&2 || fail "pip could not install; its message is above"
        describe_environment "$python" "$extra" >.venv/gradgate-stamp
    fi
    exec 9<&-
}

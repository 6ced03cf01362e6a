#!/bin/sh
# Prints a Python that is at least 3.12: a versioned name, python3 itself, or one that pyenv has installed.
# A name alone proves nothing (pyenv leaves shims of versions that are not active), so each candidate is run.

is_new_enough() {
    "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

for name in python3.14 python3.13 python3.12 python3; do
    if is_new_enough "$name"; then
        command -v "$name"
        exit 0
    fi
done

root=${PYENV_ROOT:-$HOME/.pyenv}
for path in "$root"/versions/3.14*/bin/python "$root"/versions/3.13*/bin/python "$root"/versions/3.12*/bin/python; do
    if [ -x "$path" ] && is_new_enough "$path"; then
        echo "$path"
        exit 0
    fi
done

echo "jaxinfer needs Python 3.12 or newer; found: $(python3 --version 2>&1 || echo none)" >&2
exit 1

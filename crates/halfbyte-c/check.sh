#!/usr/bin/env bash
# Compiles the examples and the tests of the C interface against what `cargo xtask install-c PREFIX` has installed, as a program does:
# by pkg-config, with shared and with static libraries, all warnings errors; and runs each under valgrind.
#
#   crates/halfbyte-c/check.sh PREFIX
#
# Without valgrind it says so and runs them plain; HALFBYTE_REQUIRE_VALGRIND=1 makes that an error.
set -euo pipefail
prefix=$(realpath "$1")
here=$(realpath "$(dirname "$0")")
model=$here/../../models/stdlib-11m
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig

# Blocks that are "possibly lost" are none: Rust's hash tables keep pointers into the middle of theirs, and threads of pools live on.
checker=()
if command -v valgrind >/dev/null; then
    checker=(valgrind --quiet --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite,indirect
        --show-leak-kinds=definite,indirect "--suppressions=$here/valgrind.supp")
elif [ "${HALFBYTE_REQUIRE_VALGRIND:-}" = 1 ]; then
    echo 'HALFBYTE_REQUIRE_VALGRIND=1, but there is no valgrind' >&2
    exit 1
else
    echo 'skipped: valgrind, which is not there' >&2
fi

compile() { # NAME SOURCE [FLAG...]
    local name=$1 source=$2
    shift 2
    local compiler=(gcc -std=c99 -Wstrict-prototypes)
    [[ $source == *.cpp ]] && compiler=(g++ -std=c++17)
    "${compiler[@]}" -O1 -g -Wall -Wextra -Wshadow -Wconversion -Werror -pedantic "$source" -o "$out/$name" "$@"
}
both() { # NAME SOURCE [ARGUMENT...]
    local name=$1 source=$2
    [[ $source == /* ]] || source=$here/$source
    shift 2
    local flags static
    flags=$(pkg-config --cflags --libs halfbyte)
    static="$(pkg-config --cflags halfbyte) $prefix/lib/libhalfbyte.a $(grep '^Libs.private:' "$PKG_CONFIG_PATH/halfbyte.pc" | cut -d: -f2-)"
    # shellcheck disable=SC2086
    compile "$name-shared" "$source" $flags "-Wl,-rpath,$prefix/lib" -lm -lpthread
    # shellcheck disable=SC2086
    compile "$name-static" "$source" $static -lm -lpthread
    readelf -d "$out/$name-shared" | grep -q 'NEEDED.*libhalfbyte.so'
    # `!` before it would fail nothing: `set -e` passes over what is negated.
    if readelf -d "$out/$name-static" | grep -q libhalfbyte; then
        echo "$name, static: expected a program without libhalfbyte.so, got one that needs it" >&2
        exit 1
    fi
    for kind in shared static; do
        echo "-- $name, $kind"
        "${checker[@]}" "$out/$name-$kind" "$@"
    done
}

# The header alone, in every language that it is for.
for language in 'c -std=c99' 'c -std=c11' 'c++ -std=c++11' 'c++ -std=c++20'; do
    # shellcheck disable=SC2086
    echo '#include <halfbyte.h>' | gcc -x $language -Wall -Wextra -Werror -pedantic -fsyntax-only -I "$prefix/include" -
done
# Folders whose names have spaces stay whole.
mkdir "$out/a b"
sed "s|^prefix=.*|prefix=$out/a b|" "$PKG_CONFIG_PATH/halfbyte.pc" >"$out/a b/halfbyte.pc"
PKG_CONFIG_PATH="$out/a b" pkg-config --cflags --libs halfbyte | grep -qF 'a\ b/include -L'
# The programs of the guide; what has no main is compiled.
awk -v out="$out" '/^```c$/ { inside = 1; file = out "/guide-" ++n ".c"; next } /^```/ { inside = 0 } inside { print > file }' \
    "$here/../../docs/guide-c.md"
for source in "$out"/guide-*.c; do
    name=$(basename "$source" .c)
    if grep -q 'int main' "$source"; then
        both "$name" "$source" "$model"
    else
        # shellcheck disable=SC2046
        compile "$name.o" "$source" -c $(pkg-config --cflags halfbyte)
    fi
done
test -e "$out/guide-3.c"

both linear examples/linear.c
both generate examples/generate.cpp "$model" 'def main():' 8
both errors tests/c/errors.c "$model" "$here/../halfbyte-checkpoint/testdata/gguf/tiny_llama.gguf"

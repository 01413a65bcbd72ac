#!/usr/bin/env bash
# Makes a release of what is committed: checks, builds into dist/, and tags. It uploads nothing and pushes nothing; it says how to.
#   scripts/release.sh VERSION
# Before: the tests have passed; the version stands in src/quantkv/__init__.py and CITATION.cff, and CHANGELOG.md's first heading is
# "## VERSION (DATE)" with CITATION.cff's date. CONTRIBUTING.md says which number is next.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:-}

fail() {
    printf 'scripts/release.sh: %s\n' "$*" >&2
    exit 2
}

[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "VERSION '$version': three numbers are needed, as in 0.2.0"
[ -z "$(git status --porcelain)" ] || fail "the working tree has changes or files that are not committed; git status lists them"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null || fail "the tag v$version is there already"
said=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/quantkv/__init__.py)
[ "$said" = "$version" ] || fail "src/quantkv/__init__.py says version $said, not $version"
cited=$(sed -n 's/^version: *//p' CITATION.cff)
[ "$cited" = "$version" ] || fail "CITATION.cff says version $cited, not $version"
date=$(sed -n 's/^date-released: *"\?\([0-9-]*\)"\?$/\1/p' CITATION.cff)
[[ $date =~ ^[0-9]{4}-[0-9]{2}-[0-9]{2}$ ]] || fail "CITATION.cff has no date-released, or '$date', where YYYY-MM-DD is needed"
heading=$(grep -m 1 '^## ' CHANGELOG.md)
[ "$heading" = "## $version ($date)" ] || fail "CHANGELOG.md begins with '$heading', where '## $version ($date)' is needed (the date is CITATION.cff's)"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
scripts/check_wheel.sh "$work/dist"
python=${PYTHON:-.venv/bin/python}
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "twine>=6.1"
"$work/venv/bin/twine" check --strict "$work"/dist/*
mkdir -p dist
cp "$work"/dist/* dist/
git tag --annotate "v$version" --message "quantkv $version"
echo "Tagged v$version. To publish: git push origin v$version && twine upload dist/quantkv-$version*"
